"""Checkpoints as they are stored: their tensors under the names of a model's parameters, and back.

transformers renames tensors when it reads a checkpoint, and joins or splits some (the weights of experts, for one). Its
rules are followed name by name. Each rule that is known becomes an expression, so that a rank reads only the stored
tensors of its own box, and an unknown rule is refused.

    stored      model.layers.0.mlp.experts.{0..E}.gate_proj.weight [I, H], ....up_proj.weight [I, H]
    held        model.layers.0.mlp.experts.gate_up_proj [E, 2 I, H]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, conversion_mapping
from transformers import core_model_loading as rules

from rlite.backends.models.expressions import (
    Concatenated,
    Expression,
    Held,
    Leaf,
    Regrouped,
    Selected,
    Shape,
    Transposed,
    parts_of,
    stacked,
    whole,
)
from rlite.errors import CheckpointError, ConfigError
from rlite.wording import counted

Values = dict[str, list[Expression]]
"""expressions by pattern of their names, in the order of the numbers in their names"""
Undo = Callable[[Values], Values]
"""returns the operands of an operation as expressions of its results"""
KNOWN_RULES = (rules.WeightRenaming, rules.PrefixChange, rules.WeightConverter)


@dataclass(frozen=True)
class _Facts:
    """Facts about one use of a converter that its operations depend on."""

    sources: list[str]
    targets: list[str]
    config: Any
    shape_of: Callable[[str], Shape]
    """returns the shape of the parameter that a target pattern stands for"""

    def only_target(self, values: Values, pattern: str) -> str:
        """Return the target if one pattern makes one, else the pattern, because further operations follow."""
        return self.targets[0] if len(values) == len(self.targets) == 1 else pattern


def _expect_alike(parts: Sequence[Expression], dim: int | None) -> None:
    """Refuse tensors of other shapes than the first, apart from their size along `dim`.

    Raises:
        ValueError: the message names a tensor.
    """
    shapes = [[size for at, size in enumerate(part.shape) if at != dim] for part in parts]
    for part, shape in zip(parts, shapes, strict=True):
        if shape != shapes[0]:
            names, others = next(iter(part.leaves())), next(iter(parts[0].leaves()))
            raise ValueError(f"{names} has shape {part.shape}, {others} {parts[0].shape}")


def _stack(op: Any, values: Values, facts: _Facts) -> tuple[Values, Undo]:
    names = {pattern: facts.only_target(values, pattern) for pattern in values}
    for parts in values.values():
        _expect_alike(parts, None)
    made: Values = {names[pattern]: [stacked(tuple(parts), op.dim)] for pattern, parts in values.items()}
    counts = {pattern: len(parts) for pattern, parts in values.items()}

    def undo(back: Values) -> Values:
        return {
            pattern: [Selected(back[names[pattern]][0], op.dim, i) for i in range(counts[pattern])]
            for pattern in counts
        }

    return made, undo


def _unstack(op: Any, values: Values, facts: _Facts) -> tuple[Values, Undo]:
    names = {pattern: facts.only_target(values, pattern) for pattern in values}
    made: Values = {
        names[pattern]: [Selected(part, op.dim, i) for i in range(part.shape[op.dim])]
        for pattern, (part,) in values.items()
    }

    def undo(back: Values) -> Values:
        return {pattern: [stacked(tuple(back[name]), op.dim)] for pattern, name in names.items()}

    return made, undo


def _concatenate(op: Any, values: Values, facts: _Facts) -> tuple[Values, Undo]:
    (target,) = facts.targets
    ordered = {pattern: values[pattern] for pattern in facts.sources if pattern in values}
    made = Concatenated(tuple(part for parts in ordered.values() for part in parts), op.dim)
    _expect_alike(made.parts, op.dim)

    def undo(back: Values) -> Values:
        cut = iter(parts_of(back[target][0], op.dim, [part.shape[op.dim] for part in made.parts]))
        return {pattern: [next(cut) for _ in parts] for pattern, parts in ordered.items()}

    return {target: [made]}, undo


def _cut(sizes_of: Callable[[Any, Expression, _Facts], list[int]]) -> Callable[..., tuple[Values, Undo]]:
    """Return an operation that cuts a tensor into a part for each target."""

    def cut(op: Any, values: Values, facts: _Facts) -> tuple[Values, Undo]:
        ((pattern, (of,)),) = values.items()
        parts = parts_of(of, op.dim, sizes_of(op, of, facts))

        def undo(back: Values) -> Values:
            return {pattern: [Concatenated(tuple(back[target][0] for target in facts.targets), op.dim)]}

        return {target: [part] for target, part in zip(facts.targets, parts, strict=True)}, undo

    return cut


def _equal_sizes(op: Any, of: Expression, facts: _Facts) -> list[int]:
    if getattr(op, "num_shards_attribute", None) is not None:  # transformers' option of 5.23
        raise NotImplementedError(f"Chunk(num_shards_attribute={op.num_shards_attribute!r})")
    total, most = of.shape[op.dim], -(-of.shape[op.dim] // len(facts.targets))  # as torch.chunk
    return [min(most, total - start) for start in range(0, total, most)]


def _target_sizes(op: Any, of: Expression, facts: _Facts) -> list[int]:
    return [facts.shape_of(target)[op.dim] for target in facts.targets]


def _transpose(op: Any, values: Values, facts: _Facts) -> tuple[Values, Undo]:
    ((pattern, (of,)),) = values.items()
    name = pattern if len(facts.targets) > 1 else facts.targets[0]
    if op.check_dims and of.shape == facts.shape_of(facts.targets[0]):
        return {name: [of]}, lambda back: {pattern: back[name]}

    def swapped(part: Expression) -> Expression:
        first, second = (dim % len(part.shape) for dim in (op.dim0, op.dim1))
        return Transposed(part, first, second)

    return {name: [swapped(of)]}, lambda back: {pattern: [swapped(back[name][0])]}


def _interleave(op: Any, values: Values, facts: _Facts) -> tuple[Values, Undo]:
    ((pattern, (of,)),) = values.items()
    made = Regrouped(of, op.dim, 1, 2 if op.inverse else of.shape[op.dim] // 2)
    target = facts.targets[0]
    return {target: [made]}, lambda back: {pattern: [made.inverse_of(back[target][0])]}


def _permute_for_rope(op: Any, values: Values, facts: _Facts) -> tuple[Values, Undo]:
    config = facts.config if op.subconfig_key is None else getattr(facts.config, op.subconfig_key, facts.config)
    heads = config.num_attention_heads
    is_last = len(facts.sources) == len(facts.targets) == 1
    names = {pattern: facts.targets[0] if is_last else pattern for pattern in values}
    made: dict[str, Regrouped] = {}
    for pattern, (part,) in values.items():
        if op.permute_layer_names is None or any(name in pattern for name in op.permute_layer_names):
            half = part.shape[0] // heads // 2
            made[pattern] = Regrouped(part, 0, heads, 2 if op.inverse else half)
    results: Values = {names[p]: [made[p]] if p in made else parts for p, parts in values.items()}

    def undo(back: Values) -> Values:
        parts = {pattern: back[name][0] for pattern, name in names.items()}
        return {p: [made[p].inverse_of(part) if p in made else part] for p, part in parts.items()}

    return results, undo


OPERATIONS: Mapping[type, Callable[[Any, Values, _Facts], tuple[Values, Undo]]] = {
    cls: operation
    for name, operation in {
        "MergeModulelist": _stack,
        "SplitModulelist": _unstack,
        "Concatenate": _concatenate,
        "Chunk": _cut(_equal_sizes),
        "Split": _cut(_target_sizes),
        "Transpose": _transpose,
        "Interleave": _interleave,
        "PermuteForRope": _permute_for_rope,
    }.items()
    if (cls := vars(rules).get(name)) is not None  # older releases have fewer
}
"""what is known of transformers' operations"""


@dataclass(frozen=True)
class Group:
    """Parameters and the stored tensors that they are made of, each expressed by the others."""

    held: dict[str, Expression]
    """parameters, of stored tensors"""
    stored: dict[str, Expression]
    """stored tensors, of parameters"""
    rule: str = ""
    """the conversion, for messages"""


@dataclass
class _Collected:
    """Stored tensors of one use of a rule, by the pattern that found them."""

    converter: Any
    names: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Rules:
    """transformers' rules for the checkpoints of one class.

    Args:
        model: the model, on any device, of a class of transformers.
        own: shapes of its parameters and stored buffers, by name.
        names: names in another model of those parameters that it has, by name in this one. None: the same model.

    Raises:
        ConfigError: a rule or an operation is not known.
    """

    model: PreTrainedModel
    own: Mapping[str, Shape]
    names: Mapping[str, str] | None = None
    renamings: list[Any] = field(init=False)
    converters: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        """Fetch the rules.

        Raises:
            ConfigError: a rule or an operation is not known.
        """
        found = conversion_mapping.get_model_conversion_mapping(self.model)
        strange = {type(rule).__name__ for rule in found if type(rule) not in KNOWN_RULES}
        for rule in found:
            strange |= {type(op).__name__ for op in getattr(rule, "operations", ()) if type(op) not in OPERATIONS}
        if strange:
            told = f"transformers converts checkpoints of {type(self.model).__name__} by {', '.join(sorted(strange))}"
            raise ConfigError(f"{told}, which rlite does not know")
        object.__setattr__(self, "renamings", [rule for rule in found if isinstance(rule, rules.WeightRenaming)])
        object.__setattr__(self, "converters", [rule for rule in found if isinstance(rule, rules.WeightConverter)])

    @property
    def trained(self) -> Mapping[str, str]:
        """Names of the parameters that the model has, by name in the checkpoint's class."""
        return {name: name for name in self.own} if self.names is None else self.names

    def collect(self, names: Iterable[str]) -> tuple[dict[str, _Collected], list[str]]:
        """Return the stored names by the parameter that they belong to, and the names that belong to none.

        Raises:
            CheckpointError: two tensors are stored for one parameter.
        """
        collected: dict[str, _Collected] = {}
        rest = []
        by_pattern = {pattern: rule for rule in self.converters for pattern in rule.source_patterns}
        for name in sorted(names, key=rules.dot_natural_key):
            target, pattern = self._renamed(name, self.renamings, self.converters)
            if target not in self.own and name in self.own:
                target, pattern = self._renamed(name, [], [])
            if target not in self.own:
                rest.append(name)
                continue
            converter = None if pattern is None else by_pattern[pattern]
            group = collected.setdefault(target, _Collected(converter))
            if group.converter is not converter or (converter is None and group.names):
                other = next(iter(group.names.values()))[0]
                raise CheckpointError(f"it holds {target} twice, as {other} and as {name}; remove one of them")
            group.names.setdefault(pattern or "", []).append(name)
        return collected, rest

    def _renamed(self, name: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None]:
        prefix: Any = self.model.base_model_prefix
        return rules.rename_source_key(name, renamings, converters, prefix, self.own)

    def group(self, target: str, collected: _Collected, shape_of: Callable[[str], Shape]) -> Group:
        """Return a parameter and the stored tensors that it is made of, or what else is made of them.

        Args:
            target: first parameter that is made.
            collected: its stored tensors.
            shape_of: returns the shape of a stored tensor.

        Raises:
            CheckpointError: the tensors do not fit the conversion.
        """
        if collected.converter is None:
            ((name,),) = collected.names.values()
            shape, target = shape_of(name), self.trained[target]
            return Group({target: Leaf(name, shape)}, {name: Leaf(target, shape)})
        rule = describe(collected.converter)
        try:
            held, undo, patterns = self._convert(target, collected, shape_of)
            leaves: Values = {pattern: [Leaf(name, part.shape)] for pattern, (name, part) in patterns.items()}
            back = undo(leaves)
            stored = {
                name: part
                for pattern, names in collected.names.items()
                for name, part in zip(names, back[pattern], strict=True)
            }
        except (ArithmeticError, LookupError, TypeError, ValueError, NotImplementedError) as error:
            some = [names[0] for names in collected.names.values()]
            found = f"{sum(map(len, collected.names.values()))} tensors such as {some[0]}"
            raise CheckpointError(f"{target} cannot be made of {found} by {rule}: {error}") from error
        return Group(held, stored, rule)

    def _convert(
        self, target: str, collected: _Collected, shape_of: Callable[[str], Shape]
    ) -> tuple[dict[str, Expression], Undo, dict[str, tuple[str, Expression]]]:
        """Return the parameters, the way back, and each parameter's name and expression by the pattern of its name."""
        converter = collected.converter
        prefix, _, suffix = target.partition(converter.target_patterns[0])
        values: Values = {p: [Leaf(n, shape_of(n)) for n in names] for p, names in collected.names.items()}
        _expect_numbers(converter, collected.names)
        facts = _Facts(
            list(converter.source_patterns),
            list(converter.target_patterns),
            self.model.config,
            lambda pattern: self.own[prefix + pattern + suffix],
        )
        undos: list[Undo] = []
        for op in converter.operations:
            values, undo = OPERATIONS[type(op)](op, values, facts)
            undos.append(undo)

        def back(found: Values) -> Values:
            for undo in reversed(undos):
                found = undo(found)
            return found

        named = {pattern: (self.trained[prefix + pattern + suffix], part) for pattern, (part,) in values.items()}
        return dict(named.values()), back, named

    def looked_for(self, name: str) -> str:
        """Return the conversion that makes a parameter of stored tensors, for messages; empty if there is none."""
        for converter in self.converters:
            reverse = converter.reverse_transform()
            if reverse.rename_source_key(name)[1] is not None:
                return describe(converter)
        return ""


def describe(converter: Any) -> str:
    """Return a text about a conversion: its operations and the names that it looks for."""
    operations = " and ".join(type(op).__name__ for op in converter.operations)
    return f"{operations} of {', '.join(map(_readable, converter.source_patterns))}"


def _expect_numbers(converter: Any, names: Mapping[str, list[str]]) -> None:
    """Refuse a list of tensors with a gap, or without a list that belongs to it.

    Raises:
        ValueError: the message names the pattern.
    """
    for pattern in converter.source_patterns:
        found = names.get(pattern, ())
        varying = [column for column in zip(*(name.split(".") for name in found), strict=False) if len(set(column)) > 1]
        numbers = [int(text) for text in varying[0] if text.isdigit()] if len(varying) == 1 else []
        gap = next((i for i, number in enumerate(numbers) if number != i), None)
        if not found or gap is not None:
            raise ValueError(f"no tensor matches {_readable(pattern).replace('*', str(gap or 0))}")
    counts = {pattern: len(found) for pattern, found in names.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(", ".join(f"{counted(n, 'tensor')} of {_readable(p)}" for p, n in counts.items()))


def _readable(pattern: str) -> str:
    return pattern.replace("\\", "")


@dataclass(frozen=True)
class Conversion:
    """Groups of parameters and stored tensors, and the stored names that belong to no parameter."""

    groups: list[Group]
    rest: list[str]
    untrained: list[str]
    """stored names of a container's other parts, which the model is not"""

    def stored(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under their stored names, as soon as all parameters of a group have been given.

        Args:
            tensors: whole tensors by the name of their parameter. An unknown name stays.

        Yields:
            Stored names and tensors, which may share memory with the given ones.

        Raises:
            CheckpointError: some parameters of a group are missing.
        """
        groups = {name: group for group in self.groups for name in group.held}
        held: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if name not in groups:
                yield name, tensor
                continue
            held[name] = tensor
            group = groups[name]
            if held.keys() >= group.held.keys():
                source = Held({name: held.pop(name) for name in group.held})
                del tensor
                for stored, expression in group.stored.items():
                    yield stored, expression.read(source, whole(expression.shape))
        if held:
            name = next(iter(held))
            told = (
                f"{name} is stored together with {', '.join(groups[name].held.keys() - held.keys())}, which is missing"
            )
            raise CheckpointError(told)


def make_conversion(found: Rules, names: Iterable[str], shape_of: Callable[[str], Shape]) -> Conversion:
    """Return the conversion of a checkpoint.

    Args:
        found: rules of the checkpoint's class.
        names: names of its tensors.
        shape_of: returns the shape of a tensor.

    Raises:
        CheckpointError: tensors do not fit the rules.
    """
    collected, rest = found.collect(names)
    groups, untrained = [], []
    for target, each in collected.items():
        if target in found.trained:
            groups.append(found.group(target, each, shape_of))
        else:
            untrained += [name for names in each.names.values() for name in names]
    return Conversion(groups, rest, untrained)


def unchanged(names: Iterable[str], shape_of: Callable[[str], Shape]) -> Conversion:
    """Return the conversion of a checkpoint whose tensors have the names of the model's parameters."""
    leaves = {name: Leaf(name, shape_of(name)) for name in names}
    return Conversion([Group({name: leaf}, {name: leaf}) for name, leaf in leaves.items()], [], [])


def default_conversion(model: PreTrainedModel, own: Mapping[str, Shape]) -> Conversion:
    """Return the conversion between a model and the checkpoint that transformers would write of it.

    Args:
        model: the model, of a class of transformers.
        own: shapes of its parameters and stored buffers, by name.
    """
    with torch.device("meta"):
        tensors = rules.revert_weight_conversion(model, {name: torch.empty(shape) for name, shape in own.items()})
    return make_conversion(Rules(model, own), tensors, lambda name: tuple(tensors[name].shape))
