"""Configuration: typed options, parsed from yaml files and from `key=value` arguments. The only place that parses.

    class SftConfig(Options):
        data: DataOptions                        # a nested group; its required keys are `data.path`, ...
        lr: Annotated[float, Ge(0)] = 5e-6
        '''peak learning rate'''                 # the sentence that --help prints

    config = load(SftConfig, ["--config", "recipe.yaml", "data.path=train.jsonl", "lr=1e-5"])

`--import FILE.py` adds to the list `imports`, in a config that has this key. `--help` prints all keys by group, and
`--help data` one group.

The way of a value, in this module but for the texts, which `rlite.key_value` and `rlite.yaml_texts` read:

    files, key=value, a program's values --merge--> tree --_resolved--> values --validated--> config
                                              every problem on the way --as_error--> one error

OmegaConf merges files and arguments and resolves interpolations (`${actor.lr}`), which see the command line and the
defaults. pydantic validates, strictly: 1.5 is no int and "yes" is no truth value. Text is read as the type of its
field: `name=001` is the string "001" for a `str` and 1 for an `int`. `null` is None if the field allows None. Lists and
mappings are written in yaml (`stop=[a, b]`). `???` marks a key that a file leaves to its user.
"""

from __future__ import annotations

import functools
import numbers
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, Unit
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AllowInfNan, BaseModel, ConfigDict, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticUndefined

from rlite import files
from rlite import help as hints
from rlite.errors import ConfigError, RliteError, UnknownOptionError
from rlite.key_value import split_arguments
from rlite.yaml_texts import NULLS, enter, flat, merged, read_value, read_yaml, to_yaml, with_aliases

C = TypeVar("C", bound="Options")

Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Rate = Annotated[float, Ge(0), AllowInfNan(False)]
Positive = Annotated[float, Gt(0)]
Finite = Annotated[float, AllowInfNan(False)]
FinitePositive = Annotated[float, Gt(0), AllowInfNan(False)]
Seed = Annotated[int, Ge(0), Lt(2**63)]
Seconds = Annotated[float, Gt(0), Unit("seconds")]
ByMemory = bool | Literal["auto"]
"""a choice that "auto" leaves to the memory that is free when an engine is built"""
CompiledParts = Literal["layers"]
"""parts of a model that torch.compile compiles"""

Interpolations = dict[str, tuple[Any, Any]]
"""key -> its value as a file gives it, `${...}`, and as it was resolved"""

IMPORTS = "imports"
"""key of the list to which `--import` adds"""
_BOOLS = {"true": True, "false": False}
_WORDS = {
    bool: "true or false",
    int: "an int",
    float: "a float",
    str: "a str",
    types.NoneType: "null",
    dict: "a mapping such as {key: value}",
    Any: "anything",
}
_is_quick = ContextVar("is_quick", default=False)
_BOUNDS = {"ge": "at least {}", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}


class Options(BaseModel):
    """A frozen group of options. Making one raises ConfigError or UnknownOptionError with all its problems at once."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, hide_input_in_errors=True
    )

    preset_of: ClassVar[str] = ""
    """the command of the base class, whose options these are with other defaults"""
    help_arguments: ClassVar[str] = ""
    """arguments of the usage line without `key=`: names without a key, and flags"""
    help_example: ClassVar[str] = ""
    """arguments of a typical call, which `--help` shows"""
    help_first: ClassVar[tuple[str, ...]] = ()
    """keys that `--help` lists before the groups, after the required keys"""
    prints_json: ClassVar[bool] = False
    """true if the command returns an `output.Result`, which `--json` prints"""

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _Problems(type(self), values).of(error).as_error() from None

    # pydantic's own mark: nested groups are then validated without this method, and report into the outer error
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        schema = model = handler(source)
        while model["type"] != "model":
            model = model["schema"]
        model["strict"] = False  # values are strict, but a group may be given as a mapping
        return schema

    @field_validator("*", mode="wrap")
    @classmethod
    def _read(cls, value: Any, validate: Callable[[Any], Any], info: Any) -> Any:
        option = cls.model_fields[info.field_name]
        if _may_be_unnamed(option):
            options = _entry_of(option.annotation).model_fields.items()  # type: ignore[union-attr]
            is_plain = {name: _is_scalar(own.annotation) for name, own in options}
            value = hints.by_name(value, info.field_name, is_plain, Options)
        elif isinstance(value, str):
            value = _read_text(value, _kinds(option.annotation))
        elif isinstance(value, Mapping) and isinstance(default := _default(option), Options):
            value = _over(default, value)
        return validate(value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems: list[str] = []
        for rules in [self.problems] if _is_quick.get() else [self.problems, self.slow_problems]:
            try:
                problems.extend(rules())
            except RliteError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("\n".join(dict.fromkeys(problems)))
        return self

    @functools.cached_property
    def _interpolated(self) -> Interpolations:
        return {}

    @classmethod
    def unread(cls, given: Mapping[str, Any]) -> Collection[str]:
        """Return the options that given options of the group leave without a meaning: a preset's give way to them."""
        return ()

    def problems(self) -> Iterable[str]:
        """Return one message for each rule between several options that does not hold.

        Groups override it, most often as a generator. It may also raise an error of rlite's own instead.
        """
        return ()

    def slow_problems(self) -> Iterable[str]:
        """Return messages as `problems` does, for rules whose check imports torch; see `quick_checks`."""
        return ()

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with changes."""
        made = type(self)(**{**dict(self), **changes})
        made._interpolated.update(self._interpolated)
        return made


@contextmanager
def quick_checks() -> Iterator[None]:
    """Check the options that are made inside of the block without `slow_problems`."""
    token = _is_quick.set(True)
    try:
        yield
    finally:
        _is_quick.reset(token)


def load(cls: type[C], argv: Sequence[str], *, aliases: Mapping[str, str] = {}, given: Mapping[str, Any] = {}) -> C:
    """Read a config from `--config FILE.yaml` (repeatable, later files win) and from `a.b.c=value`, which wins.

    `--import FILE.py` (repeatable) adds to the list `imports`. `--help` prints every key, and `--help GROUP` the keys
    of a group. Both end the program.
    """
    if (topic := hints.help_topic(argv)) is not None:
        print(describe(cls, topic))
        sys.exit(0)
    problems = _Problems(cls, {})
    try:
        tree = problems.merge(argv, aliases, given)
        values = _resolved(cls, tree)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        reason = (error.msg or str(error)).splitlines()[0]  # the other lines describe OmegaConf's own objects
        raise ConfigError(f"{where}{reason}") from error
    except RecursionError as error:
        raise ConfigError("the values of files and arguments are nested too deeply") from error
    problems.given = problems.restrict(values, OmegaConf.to_container(tree), "")
    made = problems.validated()
    made._interpolated.update(problems.interpolated)
    return made


def save(config: Options, path: str | Path) -> None:
    """Write a config as yaml that `load` reads back as an equal config. The file appears whole or not at all.

    A value that was given as an interpolation (`${oc.env:KEY}`) is written as the interpolation.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, to_yaml(to_container(config)))


def to_container(config: Any, shows: Callable[[str, str, Any], bool] = lambda *given: False) -> Any:
    """Return a config as nested dicts and lists of plain values. Interpolations stay, so secrets do not appear.

    `shows`: called with the key, the text and the value of an interpolation; True gives the value in its place.
    """
    if isinstance(config, Mapping | Options):
        plain = {key: to_container(value) for key, value in dict(config).items()}
        for key, (source, value) in (config._interpolated if isinstance(config, Options) else {}).items():
            *groups, name = key.split(".")
            group = _select(plain, groups)
            if group is not None and group.get(name) == to_container(value) and not shows(key, source, value):
                group[name] = source  # it was not replaced since
        return plain[hints.UNNAMED] if [*plain] == [hints.UNNAMED] else plain
    if isinstance(config, list | tuple):
        return [to_container(value) for value in config]
    return config.replace("${", r"\${") if isinstance(config, str) else config


def inherit(child: C, parent: Options) -> C:
    """Return `child` with each option that is None taken from `parent`, if `parent` has it. Groups are merged."""
    changes, theirs = {}, dict(parent)
    for name, value in child:
        if value is None:
            changes[name] = theirs.get(name)
        elif isinstance(value, Options) and isinstance(theirs.get(name), Options):
            changes[name] = inherit(value, theirs[name])
    return child.replace(**changes)


def changed(group: Options, own: Options | None = None) -> list[str]:
    """Return the options of a group that are not at their defaults.

    `own`: instance with the defaults, which may be those of a preset; default: those of the class.
    """
    default = dict(own or type(group)())
    return [name for name, value in group if value != default[name]]


def set_keys(config: Options) -> list[str]:
    """Return the keys of a config whose values are not the defaults of its class, which may be those of a preset."""
    defaults: dict[str, Any] = {}
    for path, _, value in _keys(type(config), has_entries=True):
        defaults |= flat({path.replace(".NAME.", r"\.[^.]+\."): to_container(value)})
    patterns = [path for path in defaults if "^" in path]

    def is_set(key: str, value: Any) -> bool:
        path = key if key in defaults else next((path for path in patterns if re.fullmatch(path, key)), "")
        return path not in defaults or value != defaults[path]

    return [key for key, value in flat(to_container(config)) if is_set(key, value)]


def describe(cls: type[Options], topic: str = "", command: str = "") -> str:
    """Return the text of `--help`: the usual keys, then every key by group, with its type, default and sentence.

    `topic`: a group, such as "data" or "actor.optimizer", or a key; "" is everything.
    """
    keys = {path: _describe_key(path, option, value) for path, option, value in _keys(cls, has_entries=True)}
    of_required = tuple(f"{name}." for name, option in cls.model_fields.items() if option.is_required())
    required = [path for path in _required(cls) if f"{path}.".startswith(of_required)]
    name, own_code = f"{command} " if command else "", "[--import FILE.py]..." if IMPORTS in cls.model_fields else ""
    as_json = "[--json]" if cls.prints_json else ""
    forms = filter(None, [cls.help_arguments, as_json, "[--config FILE.yaml]...", own_code, "[key=value]..."])
    usage = [f"usage: {name}{' '.join(forms)}"]
    if cls.preset_of:
        changed = [f"{path}={_show(to_container(value))}" for path, value in _preset_values(cls).items()]
        usage += hints.wrapped(f"preset: rlite {cls.preset_of} {' '.join(changed)}")
    if cls.help_example:
        usage.append(f"example: {name}{cls.help_example}")
    titles = {group: _title(cls, group) for group in {path.rpartition(".")[0] for path in keys}}
    return hints.text(keys, titles, list(dict.fromkeys([*required, *cls.help_first])), usage, topic, name)


def _title(cls: type[Options], group: str) -> str:
    hint = _locate(cls, group.split(".")).hint if group else None
    made = _group_of(hint) or _entry_of(hint)
    sentence = (made.__doc__ or "").split("\n\n")[0] if made else ""
    return f"{group}: {' '.join(sentence.split())}" if made else "options"


def _describe_key(path: str, option: FieldInfo, value: Any) -> str:
    default = "<required>" if value is PydanticUndefined else _show(to_container(value))
    limits = _limits(option).replace("a number ", "").replace("a finite number", "finite").replace(" of ", ", ")
    sentence = " ".join((option.description or "").split())
    return hints.described(path, default, ", ".join(filter(None, (_name(option.annotation), limits))), sentence)


def _preset_values(cls: type[Options]) -> dict[str, Any]:
    """Return the defaults in which a preset differs from the options of its base class, by key."""
    before = {path: value for path, _, value in _keys(cls.__mro__[1])} if cls.preset_of else {}
    return {path: value for path, _, value in _keys(cls) if path in before and value != before[path]}


def choices(cls: type[Options]) -> dict[str, list[str]]:
    """Return the values of each key, as arguments, if its type enumerates them; else []."""
    return {path: _enumerated(option.annotation) for path, option, _ in _keys(cls)}


def _enumerated(hint: Any) -> list[str]:
    kinds = _kinds(hint)
    values = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    values += [True, False] if bool in kinds else []
    return [_show(value) for value in (*values, *([None] if values and types.NoneType in kinds else []))]


def schema(cls: type[Options]) -> dict[str, Any]:
    """Return the JSON schema of a yaml file for `cls`. No key is required, because arguments may give it."""
    return {"$schema": _RecipeSchema.schema_dialect, **cls.model_json_schema(schema_generator=_RecipeSchema)}


class _RecipeSchema(GenerateJsonSchema):
    def field_is_required(self, field: Any, total: bool) -> bool:
        return False

    def model_field_schema(self, schema: Any) -> dict[str, Any]:
        value = super().model_field_schema(schema)
        if value.get("type") == "string":
            return value
        interpolation = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
        shared = {"default": value.pop("default")} if "default" in value else {}
        return {"anyOf": [value, interpolation], **shared}


# ---------------------------------------------------------------------------------------------------------------------
# values


def _resolved(cls: type[Options], tree: DictConfig) -> Any:
    """Return the given values and the defaults, resolved: interpolations may name keys left at their defaults."""
    known: Any = OmegaConf.to_container(tree)
    for path, _, value in _keys(cls):
        *groups, name = path.split(".")
        node = known
        for group in groups:
            node = node.setdefault(group, {}) if isinstance(node, dict) else None
        if isinstance(node, dict) and value is not PydanticUndefined:
            node.setdefault(name, to_container(value))
    return OmegaConf.to_container(OmegaConf.create(known), resolve=True)


def _read_text(text: str, kinds: Sequence[Any]) -> Any:
    """Return the number, truth value or None that a text means to these types, else the text."""
    words: dict[str, Any] = dict.fromkeys(NULLS if types.NoneType in kinds else ()) | (_BOOLS if bool in kinds else {})
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        if kind in kinds:
            with suppress(ValueError):
                return kind(text)
    return text


def _over(default: Options, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's values: those given, else those of the default instance, unless the given rule them out."""
    values = {name: value for name, value in default if name not in type(default).unread(given)}
    for name, value in given.items():
        own = values.get(name)
        values[name] = _over(own, value) if isinstance(own, Options) and isinstance(value, Mapping) else value
    return values


# ---------------------------------------------------------------------------------------------------------------------
# from pydantic's errors to messages


@dataclass
class _Problems(Generic[C]):
    """Everything that is wrong with a config, so that a user corrects a file once and not key by key."""

    root: type[C]
    given: Mapping[str, Any]
    sources: dict[str, str] = field(default_factory=dict)
    """key -> the file, or the command line, that gave its value"""
    interpolated: Interpolations = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def merge(self, argv: Sequence[str], aliases: Mapping[str, str], given: Mapping[str, Any]) -> DictConfig:
        """Return the unresolved values of files, arguments and a program. Later values replace earlier values."""
        named, overrides = split_arguments(argv, IMPORTS in self.root.model_fields)
        tree = OmegaConf.create({})
        for file in named["--config"]:
            read = with_aliases(read_yaml(file), aliases)
            self.sources |= {key: file for key, _ in flat(OmegaConf.to_container(read))}  # type: ignore[arg-type]
            tree = merged(tree, read, file, named["--config"][0])
        values = [(key, value, hints.COMMAND_LINE) for key, value in overrides]
        for key, value, source in [*values, *((key, value, hints.PROGRAM) for key, value in _flat(self.root, given))]:
            key = aliases.get(key, key)
            at = _locate(self.root, key.split("."))
            if not at.is_exact and not _is_open(at.hint):
                self.unknown[key] = f"{_unknown(self.root, key)} ({source})"
                continue
            if source is hints.COMMAND_LINE and not (at.is_exact and _is_scalar(at.hint)):
                value = read_value(key, value)
            enter(tree, key, value, self._source(key))
            self.sources |= {below: source for below, _ in flat({key: value})}
        if added := named.get("--import"):
            before = OmegaConf.to_container(tree).get(IMPORTS) or []  # type: ignore[union-attr]
            tree[IMPORTS] = list(dict.fromkeys([*before, *added])) if isinstance(before, list) else before
            self.sources[IMPORTS] = hints.COMMAND_LINE
        return tree

    def restrict(self, values: Any, given: Any, path: str) -> Any:
        """Return the resolved values of the given keys. `???` is missing, even if the key has a default.

        `values`: given values and defaults, resolved.
        """
        if isinstance(given, dict):
            below = {name: f"{path}.{name}" if path else str(name) for name in given}
            self.missing += [below[name] for name in given if given[name] == "???"]
            return {k: self.restrict(values[k], given[k], below[k]) for k in given if given[k] != "???"}
        if "${" in str(given):
            self.interpolated[path] = (given, values)
        return values

    def validated(self) -> C:
        """Return the config, or raise one error with all problems."""
        try:
            made = self.root.model_validate(self.given)
        except ValidationError as error:
            raise self.of(error).as_error() from None
        if self.unknown or self.missing:
            raise self.as_error()
        return made

    def of(self, error: ValidationError) -> Self:
        """Return these problems, with the problems that pydantic found."""
        for found in error.errors(include_url=False):
            at = _locate(self.root, found["loc"])
            if found["type"] in ("extra_forbidden", "invalid_key"):
                for key, _ in flat({_joined(found["loc"]): found["input"]}):
                    self.unknown[key] = f"{_unknown(self.root, key)}{self._source(key)}"
            elif found["type"] == "missing":
                group = _group_of(at.hint)
                self.missing += [f"{at.key}.{path}" for path in (_required(group) if group else ())] or [at.key]
            elif found["type"] == "value_error":  # a rule between several options
                lines = str(found["ctx"]["error"]).splitlines()
                whole = [_prefixed(line, at, found["input"]) for line in lines]
                setters = {**dict.fromkeys(_preset_values(self.root), hints.PRESET), **self.sources}
                self.wrong.update({line: f"{line}{hints.set_by(line, at.key, setters)}" for line in whole})
            else:
                value = found["input"] if at.is_exact else _select(self.given, at.key.split("."))
                value = self.interpolated.get(at.key, (value,))[0]
                message = f"{at.key}={_show(value)}: expected {_expected(found, at)}{self._source(at.key)}"
                self.wrong.setdefault(at.key, message)
        return self

    def as_error(self) -> RliteError:
        """Return one error with all problems, unknown keys first."""
        lines = [*self.unknown.values(), *self.wrong.values()]
        if self.missing:
            keys = ", ".join(dict.fromkeys(self.missing))
            lines.append(f"required and not set: {keys} (give KEY=VALUE, or --help for all keys)")
        return (UnknownOptionError if self.unknown else ConfigError)("\n".join(lines))

    def _source(self, key: str) -> str:
        while key and key not in self.sources:
            key = key.rpartition(".")[0]
        return f" ({self.sources[key]})" if key else ""


class _Location(NamedTuple):
    """The last option on the path of a key, and whether the path ends there."""

    key: str
    hint: Any
    option: FieldInfo | None
    is_exact: bool


def _locate(root: type[Options], way: Sequence[int | str]) -> _Location:
    hint: Any = root
    option: FieldInfo | None = None
    for depth, part in enumerate(way):
        if entry := _entry_of(hint):
            is_unnamed = _may_be_unnamed(option) and part in entry.model_fields
            hint, option = entry, None
            if not is_unnamed:
                continue
        group = _group_of(hint)
        if group is None or part not in group.model_fields:
            return _Location(_joined(way[:depth]), hint, option, False)
        option = group.model_fields[str(part)]
        hint = option.annotation
    return _Location(_joined(way), hint, option, True)


def _joined(way: Sequence[int | str]) -> str:
    """Return a path as a key. The name of an unnamed entry is empty, and left out."""
    return ".".join(str(part) for part in way if part != "")


def _prefixed(line: str, at: _Location, value: Any) -> str:
    """Return the message of a rule with the whole key, if the message does not have it."""
    if not at.key or re.match(rf"{re.escape(at.key)}[.=:]", line):
        return line
    own = re.escape(at.key.rpartition(".")[2])
    if re.match(rf"{own}[.=:]", line):
        return re.sub(rf"(?<![\w.=/]){own}(?=[.=:])", at.key, line)
    if (group := _group_of(at.hint)) is None:
        return f"{at.key}={_show(value)}: {line}"
    return f"{at.key}.{line}" if re.split(r"[=:.]", line)[0] in group.model_fields else f"{at.key}: {line}"


def _expected(found: Any, at: _Location) -> str:
    kind = found["type"]
    if kind == "string_type":
        return "a string (in yaml, quote it)"
    if group := _group_of(at.hint):
        needs_keys = any(option.is_required() for option in group.model_fields.values())
        or_defaults = "" if needs_keys else ", or {} for its defaults"
        return f"keys of the group, such as {at.key}.{next(iter(group.model_fields))}=...{or_defaults}"
    if at.option and kind.startswith(("greater", "less", "finite", "too")):
        return _limits(at.option)
    return f"{_name(at.hint)}{', written [a, b]' if kind == 'list_type' else ''}"


def _limits(option: FieldInfo) -> str:
    """Return the range of a number in words: at least 0. A mapping has a range of its keys and one of its values."""
    if maps := [kind for kind in (option.annotation, *get_args(option.annotation)) if get_origin(kind) is dict]:
        parts = zip(("keys", "values"), get_args(maps[0]), strict=True)
        ranges = ((name, _range(get_args(kind)[1:])) for name, kind in parts)
        return "; ".join(f"{name} {words}" for name, words in ranges if words)
    return _range([*option.metadata, *(item for kind in get_args(option.annotation) for item in get_args(kind)[1:])])


def _range(limits: Sequence[Any]) -> str:
    """Return the range that constraints make, in words."""
    bounds = {name: getattr(limit, name) for limit in limits for name in (*_BOUNDS, "unit") if hasattr(limit, name)}
    if "ge" in bounds and "le" in bounds:
        return f"a number between {bounds['ge']} and {bounds['le']}"
    words = " and ".join(words.format(bounds[name]) for name, words in _BOUNDS.items() if name in bounds)
    if any(isinstance(limit, AllowInfNan) for limit in limits):
        words = f"a finite number of {words}" if words else "a finite number"
    return " ".join(filter(None, (words, bounds.get("unit"))))


# ---------------------------------------------------------------------------------------------------------------------
# keys and types


def _keys(
    cls: type[Options], default: Options | None = None, prefix: str = "", has_entries: bool = False
) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield every key with its option and its default, which is PydanticUndefined if the key is required.

    `default`: instance that has the defaults, if they are not those of the class.
    """
    for name, option in cls.model_fields.items():
        group, entry = _group_of(option.annotation), _entry_of(option.annotation)
        value = _default(option) if default is None else dict(default)[name]
        if group is None or value is None:
            yield f"{prefix}{name}", option, value
        if has_entries and entry is not None:
            yield from _keys(entry, None, f"{prefix}{name}.NAME.")
        if (group := entry if _may_be_unnamed(option) else group) is not None:
            yield from _keys(group, value if isinstance(value, group) else None, f"{prefix}{name}.", has_entries)


def _required(cls: type[Options]) -> list[str]:
    """Return the keys that have no default."""
    return [path for path, _, value in _keys(cls) if value is PydanticUndefined]


def _default(option: FieldInfo) -> Any:
    """Return the default, or PydanticUndefined if the option is required or a group with its own defaults."""
    if isinstance(option.default_factory, type) and issubclass(option.default_factory, Options):
        return PydanticUndefined
    return option.get_default(call_default_factory=True, validated_data={})


def _unknown(cls: type[Options], key: str) -> str:
    known = [path for path, *_ in _keys(cls)]
    at = _locate(cls, key.split(".")[:-1])
    if at.key and (entry := _group_of(at.hint) if at.option is None else _entry_of(at.hint)):
        known = [f"{at.key}.{path}" for path, *_ in _keys(entry)]
    return f"unknown key {key!r}; {hints.nearest_key(key, known, [*_required(cls), *cls.help_first])}"


def _flat(root: type[Options], given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a program by their whole keys. A mapping for a group has values of the group."""
    for name, value in given.items():
        key = f"{prefix}{name}"
        at = _locate(root, key.split("."))
        is_group = at.is_exact and (_group_of(at.hint) or _entry_of(at.hint))
        if is_group and isinstance(value, Mapping) and value:
            yield from _flat(root, value, f"{key}.")
        else:
            yield key, _plain(value)


def _plain(value: Any) -> Any:
    """Return a path as a text, and a number of NumPy as one of Python."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value


def _select(values: Any, way: Sequence[str]) -> Any:
    for name in way:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _kinds(hint: Any) -> list[Any]:
    """Return the alternatives of a union, without their constraints."""
    if get_origin(hint) is Annotated:
        return _kinds(get_args(hint)[0])
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    return [kind for member in members for kind in _kinds(member)] or [hint]


def _group_of(hint: Any) -> type[Options] | None:
    """Return the group that a type names, also in `X | None`."""
    return next((kind for kind in _kinds(hint) if isinstance(kind, type) and issubclass(kind, Options)), None)


def _entry_of(hint: Any) -> type[Options] | None:
    """Return the group that each value of a mapping is: `G` of `dict[str, G]`."""
    values = [get_args(kind)[1] for kind in _kinds(hint) if get_origin(kind) is dict]
    return _group_of(values[0]) if values else None


def _may_be_unnamed(option: FieldInfo | None) -> bool:
    return option is not None and option.json_schema_extra is hints.single_or_named


def _is_open(hint: Any) -> bool:
    """Return whether keys below an option are its user's own."""
    return any((get_origin(kind) or kind) in (Any, dict) for kind in _kinds(hint))


def _is_scalar(hint: Any) -> bool:
    return all(kind in (str, int, float, bool, types.NoneType) or get_origin(kind) is Literal for kind in _kinds(hint))


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return value if isinstance(value, str) else repr(value)


def _name(hint: Any) -> str:
    """Return a type in words."""
    kinds = _kinds(hint)
    if len(kinds) > 1:
        return " or ".join(map(_name, sorted(kinds, key=lambda kind: kind is types.NoneType)))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is list:
        return f"a list of {_name(get_args(hint)[0]).split(maxsplit=1)[-1]}"
    if get_origin(hint) is dict and (value := get_args(hint)[1]) is not Any:
        return f"a mapping {{key: {_name(value)}}}"
    return _WORDS.get(get_origin(kinds[0]) or kinds[0], getattr(hint, "__name__", str(hint)))
