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
from torch import Tensor, nn
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

Parts = list[Expression]
Values = dict[str, Parts]
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


Change = Callable[[Any, str, Parts, _Facts], tuple[Parts, Callable[[Parts], Parts]]]
"""makes other tensors of those of one pattern, and returns them with the way back"""


def _expect_alike(parts: Sequence[Expression], dim: int | None) -> None:
    """Refuse tensors of other shapes than the first, apart from their size along `dim`."""
    shapes = [[size for at, size in enumerate(part.shape) if at != dim] for part in parts]
    for part, shape in zip(parts, shapes, strict=True):
        if shape != shapes[0]:
            name, other = (next(iter(each.leaves())) for each in (part, parts[0]))
            raise ValueError(f"{name} has shape {part.shape}, {other} {parts[0].shape}")


def _each(change: Change) -> Callable[[Any, Values, _Facts], tuple[Values, Undo]]:
    """Return an operation that changes the tensors of each pattern apart.

    If one pattern makes one target, the result has the target's name, else the pattern's: further operations follow.
    """

    def apply(op: Any, values: Values, facts: _Facts) -> tuple[Values, Undo]:
        is_last = len(values) == len(facts.targets) == 1
        names = {pattern: facts.targets[0] if is_last else pattern for pattern in values}
        made = {pattern: change(op, pattern, parts, facts) for pattern, parts in values.items()}
        results = {names[pattern]: parts for pattern, (parts, _) in made.items()}
        return results, lambda back: {pattern: undo(back[names[pattern]]) for pattern, (_, undo) in made.items()}

    return apply


def _stack(op: Any, pattern: str, parts: Parts, facts: _Facts) -> tuple[Parts, Callable[[Parts], Parts]]:
    _expect_alike(parts, None)
    return [stacked(tuple(parts), op.dim)], lambda back: [Selected(back[0], op.dim, i) for i in range(len(parts))]


def _transpose(op: Any, pattern: str, parts: Parts, facts: _Facts) -> tuple[Parts, Callable[[Parts], Parts]]:
    if op.check_dims and parts[0].shape == facts.shape_of(facts.targets[0]):
        return parts, lambda back: back

    def swapped(parts: Parts) -> Parts:
        return [Transposed(part, op.dim0 % len(part.shape), op.dim1 % len(part.shape)) for part in parts]

    return swapped(parts), swapped


def _interleave(op: Any, pattern: str, parts: Parts, facts: _Facts) -> tuple[Parts, Callable[[Parts], Parts]]:
    made = Regrouped(parts[0], op.dim, 1, 2 if op.inverse else parts[0].shape[op.dim] // 2)
    return [made], lambda back: [made.inverse_of(back[0])]


def _permute_for_rope(op: Any, pattern: str, parts: Parts, facts: _Facts) -> tuple[Parts, Callable[[Parts], Parts]]:
    if op.permute_layer_names is not None and not any(name in pattern for name in op.permute_layer_names):
        return parts, lambda back: back
    config = facts.config if op.subconfig_key is None else getattr(facts.config, op.subconfig_key, facts.config)
    heads = config.num_attention_heads
    made = Regrouped(parts[0], 0, heads, 2 if op.inverse else parts[0].shape[0] // heads // 2)
    return [made], lambda back: [made.inverse_of(back[0])]


def _concatenate(op: Any, values: Values, facts: _Facts) -> tuple[Values, Undo]:
    (target,) = facts.targets
    ordered = {pattern: values[pattern] for pattern in facts.sources}
    made = Concatenated(tuple(part for parts in ordered.values() for part in parts), op.dim)
    _expect_alike(made.parts, op.dim)

    def undo(back: Values) -> Values:
        cut = iter(parts_of(back[target][0], op.dim, [part.shape[op.dim] for part in made.parts]))
        return {pattern: [next(cut) for _ in parts] for pattern, parts in ordered.items()}

    return {target: [made]}, undo


def _cut(op: Any, values: Values, facts: _Facts) -> tuple[Values, Undo]:
    # a part for each target: of the target's size (Split), or of equal sizes (Chunk)
    if getattr(op, "num_shards_attribute", None) is not None:  # transformers' option of 5.23
        raise NotImplementedError(f"Chunk(num_shards_attribute={op.num_shards_attribute!r})")
    ((pattern, (of,)),) = values.items()
    total = of.shape[op.dim]
    most = -(-total // len(facts.targets))  # as torch.chunk
    sizes = [min(most, total - start) for start in range(0, total, most)]
    if type(op) is not rules.Chunk:
        sizes = [facts.shape_of(target)[op.dim] for target in facts.targets]
    parts = parts_of(of, op.dim, sizes)

    def undo(back: Values) -> Values:
        return {pattern: [Concatenated(tuple(back[target][0] for target in facts.targets), op.dim)]}

    return {target: [part] for target, part in zip(facts.targets, parts, strict=True)}, undo


OPERATIONS: Mapping[str, Callable[[Any, Values, _Facts], tuple[Values, Undo]]] = {
    "MergeModulelist": _each(_stack),
    "Concatenate": _concatenate,
    "Chunk": _cut,
    "Split": _cut,
    "Transpose": _each(_transpose),
    "Interleave": _each(_interleave),
    "PermuteForRope": _each(_permute_for_rope),
}
"""transformers' operations by the names of their classes"""


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


class Rules:
    """transformers' rules for the checkpoints of one class.

    `own`: shapes of its parameters and stored buffers, by name. `names`: names in another model of those parameters
    that it has, by name in this one. None: the same model.
    """

    def __init__(
        self, model: PreTrainedModel, own: Mapping[str, Shape], names: Mapping[str, str] | None = None
    ) -> None:
        self._model, self._own = model, own
        self.trained = {name: name for name in own} if names is None else names
        """names of the parameters that the model has, by name in the checkpoint's class"""
        found = conversion_mapping.get_model_conversion_mapping(model)
        self._renamings = [rule for rule in found if isinstance(rule, rules.WeightRenaming)]
        self._converters = [rule for rule in found if isinstance(rule, rules.WeightConverter)]
        operations = {type(op) for rule in self._converters for op in rule.operations}
        strange = {cls.__name__ for cls in {type(rule) for rule in found}.difference(KNOWN_RULES)}
        strange |= {cls.__name__ for cls in operations if vars(rules).get(cls.__name__) is not cls}
        strange |= {cls.__name__ for cls in operations}.difference(OPERATIONS)
        if strange:
            told = f"transformers converts checkpoints of {type(model).__name__} by {', '.join(sorted(strange))}"
            raise ConfigError(f"{told}, which rlite does not know")

    def collect(self, names: Iterable[str]) -> tuple[dict[str, _Collected], list[str]]:
        """Return the stored names by the parameter that they belong to, and the names that belong to none."""
        collected: dict[str, _Collected] = {}
        rest = []
        by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        for name in sorted(names, key=rules.dot_natural_key):
            target, pattern = self._renamed(name, self._renamings, self._converters)
            if target not in self._own and name in self._own:
                target, pattern = self._renamed(name, [], [])
            if target not in self._own:
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
        prefix: Any = self._model.base_model_prefix
        return rules.rename_source_key(name, renamings, converters, prefix, self._own)

    def group(self, target: str, collected: _Collected, shape_of: Callable[[str], Shape]) -> Group:
        """Return a parameter and the stored tensors that it is made of, or what else is made of them.

        `shape_of`: returns the shape of a stored tensor.
        """
        if collected.converter is None:
            ((name,),) = collected.names.values()
            shape, target = shape_of(name), self.trained[target]
            return Group({target: Leaf(name, shape)}, {name: Leaf(target, shape)})
        try:
            return self._converted(target, collected, shape_of)
        except (ArithmeticError, LookupError, TypeError, ValueError, NotImplementedError) as error:
            counts = sum(map(len, collected.names.values()))
            found = f"{counted(counts, 'tensor')} such as {next(iter(collected.names.values()))[0]}"
            told = f"{target} cannot be made of {found} by {describe(collected.converter)}"
            raise CheckpointError(f"{told}: {error}") from error

    def _converted(self, target: str, collected: _Collected, shape_of: Callable[[str], Shape]) -> Group:
        converter = collected.converter
        _expect_numbers(converter, collected.names)
        prefix, _, suffix = target.partition(converter.target_patterns[0])
        facts = _Facts(
            list(converter.source_patterns),
            list(converter.target_patterns),
            self._model.config,
            lambda pattern: self._own[prefix + pattern + suffix],
        )
        values: Values = {p: [Leaf(n, shape_of(n)) for n in names] for p, names in collected.names.items()}
        undos: list[Undo] = []
        for op in converter.operations:
            values, undo = OPERATIONS[type(op).__name__](op, values, facts)
            undos.append(undo)
        names = {pattern: self.trained[prefix + pattern + suffix] for pattern in values}
        held = {names[pattern]: part for pattern, (part,) in values.items()}
        back: Values = {pattern: [Leaf(name, held[name].shape)] for pattern, name in names.items()}
        for undo in reversed(undos):
            back = undo(back)
        stored = [pair for p, of in collected.names.items() for pair in zip(of, back[p], strict=True)]
        return Group(held, dict(stored), describe(converter))

    def looked_for(self, name: str) -> str:
        """Return the conversion that makes a parameter of stored tensors, for messages; empty if there is none."""
        for converter in self._converters:
            reverse = converter.reverse_transform()
            if reverse.rename_source_key(name)[1] is not None:
                return describe(converter)
        return ""


def name_before(model: nn.Module, name: str) -> str:
    """Return the stored name that transformers' renamings turn into `name`: mostly the name itself.

    PEFT applies the renamings of checkpoints to the names of adapters. Some renamings change a model's own names, too.
    """
    if not isinstance(model, PreTrainedModel):
        return name
    found = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [rule for rule in found if isinstance(rule, rules.WeightRenaming)]
    candidates = (name, *(rule.reverse_transform().rename_source_key(name)[0] for rule in renamings))
    return next((each for each in candidates if rules.rename_source_key(each, renamings, [])[0] == name), name)


def describe(converter: Any) -> str:
    """Return a text about a conversion: its operations and the names that it looks for."""
    operations = " and ".join(type(op).__name__ for op in converter.operations)
    return f"{operations} of {', '.join(map(_readable, converter.source_patterns))}"


def _expect_numbers(converter: Any, names: Mapping[str, list[str]]) -> None:
    """Refuse a list of tensors with a gap, or without a list that belongs to it."""
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

        `tensors`: whole tensors by the name of their parameter. An unknown name stays.
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
            missing = ", ".join(groups[name].held.keys() - held.keys())
            raise CheckpointError(f"{name} is stored together with {missing}, which is missing")


def make_conversion(found: Rules, names: Iterable[str], shape_of: Callable[[str], Shape]) -> Conversion:
    """Return the conversion of a checkpoint.

    `shape_of`: returns the shape of a tensor.
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

    `own`: shapes of its parameters and stored buffers, by name.
    """
    with torch.device("meta"):
        tensors = rules.revert_weight_conversion(model, {name: torch.empty(shape) for name, shape in own.items()})
    return make_conversion(Rules(model, own), tensors, lambda name: tuple(tensors[name].shape))
