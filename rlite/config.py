"""Configuration: frozen keyword-only dataclasses <- yaml files <- `key=value` arguments. The only place that parses.

    @dataclass(frozen=True, kw_only=True)
    class SftConfig:
        data: DataConfig                       # a nested group; its required keys are `data.path`, ...
        lr: float = 5e-6
        '''peak learning rate'''               # the sentence that --help prints

    config = load(SftConfig, ["--config", "recipe.yaml", "data.path=train.jsonl", "lr=1e-5"])

A value is read as its field's type says: `name=001` is the string "001" for a `str` and 1 for an `int`. `null` is
None where None is allowed; lists and dicts are written in yaml (`stop=[a, b]`). Files may use OmegaConf's
interpolations (`${actor.lr}`) and see what the command line sets; `???` marks what a file leaves to its user.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import functools
import inspect
import os
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlite.errors import ConfigError, UnknownOptionError, did_you_mean

C = TypeVar("C")

_NULLS = ("null", "none", "~")
_BOOLS = {"true": True, "false": False}


class Interpolated(str):
    """A text that was given as an interpolation: its value, which remembers its `source`."""

    source: str

    def __new__(cls, value: str, source: str) -> Interpolated:
        text = super().__new__(cls, value)
        text.source = source
        return text

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.source


def load(cls: type[C], argv: Sequence[str], *, aliases: Mapping[str, str] | None = None) -> C:
    """Read `cls` from `--config FILE.yaml` (repeatable, later ones win) and, winning over files, `a.b.c=value`.

    `aliases` maps other spellings of keys to the fields they mean. `--help` prints every key and ends the program.
    Raises: UnknownOptionError naming the whole key and the nearest real one; ConfigError naming key, value and what
    was expected, the missing required keys together, or the file that cannot be read.
    """
    aliases = aliases or {}
    files, overrides = _split_arguments(cls, argv)
    tree = typing.cast(DictConfig, OmegaConf.merge({}, *(_with_aliases(_read_yaml(file), aliases) for file in files)))
    for key, text in overrides:
        key = aliases.get(key, key)
        OmegaConf.update(tree, key, _from_text(cls, key, text), merge=True)
    return from_mapping(cls, _resolved(cls, tree))


def from_mapping(cls: type[C], given: Mapping[str, Any]) -> C:
    """Build `cls` from nested mappings, with the checks and the errors of `load`."""
    reader = _Reader(cls)
    values = reader.read_group(cls, given, default=None, path="")
    reader.raise_problems()
    return _construct(cls, values, path="")


def save(config: Any, path: str | Path) -> None:
    """Write a config as yaml that `load` reads back as an equal one. The file appears whole or not at all.

    Texts that were given as interpolations (`${oc.env:KEY}`) are written as they were given, not as their values.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(yaml.safe_dump(to_container(config), sort_keys=False, allow_unicode=True))
    os.replace(partial, path)


def to_container(config: Any) -> Any:
    """A config as nested dicts and lists of plain values; interpolated texts as they were given, so without secrets."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_container(getattr(config, f.name)) for f in dataclasses.fields(config) if f.init}
    if isinstance(config, Mapping):
        return {key: to_container(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_container(value) for value in config]
    if isinstance(config, enum.Enum):
        return config.name
    if isinstance(config, Interpolated):
        return config.source
    if isinstance(config, Path):
        config = str(config)
    return config.replace("${", r"\${") if isinstance(config, str) else config


def inherit(child: C, parent: Any) -> C:
    """`child` with each field that is None taken from the field of the same name in `parent`, groups included."""
    theirs = {f.name: getattr(parent, f.name) for f in dataclasses.fields(parent)}
    changes = {}
    for field in dataclasses.fields(child):  # type: ignore[arg-type]  # C is a dataclass
        value = getattr(child, field.name)
        if theirs.get(field.name) is None:
            continue
        if value is None:
            changes[field.name] = theirs[field.name]
        elif dataclasses.is_dataclass(value) and dataclasses.is_dataclass(theirs[field.name]):
            changes[field.name] = inherit(value, theirs[field.name])
    return dataclasses.replace(child, **changes)  # type: ignore[type-var]


def describe(cls: type) -> str:
    """The text of `--help`: every key with its type, its default and its sentence."""
    lines = ["usage: [--config FILE.yaml]... [key=value]...", ""]
    for key in _keys(cls):
        default = "<required>" if key.default is dataclasses.MISSING else _show(to_container(key.default))
        lines.append(f"{key.path}={default}  ({_name(key.hint)})")
        lines += textwrap.wrap(key.doc, 112, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# arguments and files


def _split_arguments(cls: type, argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    files: list[str] = []
    overrides: list[tuple[str, str]] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        key, equals, text = argument.partition("=")
        if argument in ("--help", "-h"):
            print(describe(cls))
            sys.exit(0)
        if key == "--config":
            if not equals and not rest:
                raise ConfigError("--config: expected a yaml file after it")
            files.append(text if equals else rest.pop(0))
        elif equals and key and not key.startswith("-"):
            overrides.append((key, text))
        else:
            raise ConfigError(f"argument {argument!r}: expected key=value, --config FILE.yaml or --help")
    return files, overrides


def _read_yaml(file: str) -> DictConfig:
    try:
        loaded = OmegaConf.load(file)
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {file}: not valid yaml: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"--config {file}: expected a mapping of keys to values, found a list")
    return loaded


def _with_aliases(tree: DictConfig, aliases: Mapping[str, str]) -> DictConfig:
    for alias, key in aliases.items():
        *groups, leaf = alias.split(".")
        parent = OmegaConf.select(tree, ".".join(groups)) if groups else tree
        if isinstance(parent, DictConfig) and leaf in parent:
            if OmegaConf.select(tree, key) is not None:
                raise ConfigError(f"{alias} is another spelling of {key}: give only one of them")
            OmegaConf.update(tree, key, parent.pop(leaf))
            while groups and not OmegaConf.select(tree, ".".join(groups)):  # groups that only the alias needed
                leaf = groups.pop()
                (OmegaConf.select(tree, ".".join(groups)) if groups else tree).pop(leaf)
    return tree


def _resolved(cls: type, tree: DictConfig) -> dict[str, Any]:
    """What was given, as plain values. Interpolations may name any key, those left at their defaults too."""
    defaults = OmegaConf.create({})
    for key in _keys(cls):
        if key.default is not dataclasses.MISSING:
            OmegaConf.update(defaults, key.path, to_container(key.default))
    try:
        known = OmegaConf.to_container(OmegaConf.merge(defaults, tree), resolve=True)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        reason = (error.msg or str(error)).splitlines()[0]  # what follows is of OmegaConf's own objects
        raise ConfigError(f"{where}{reason}") from error
    return _restrict(known, OmegaConf.to_container(tree))


def _restrict(values: Any, shape: Any) -> Any:
    """`values` without the keys that `shape` lacks; what a file left open stays open, whatever the default.

    Texts that `shape` interpolates remember it.
    """
    if isinstance(values, dict) and isinstance(shape, dict):
        return {key: _restrict(values[key], shape[key]) for key in shape}
    if isinstance(values, list) and isinstance(shape, list):
        return [_restrict(value, item) for value, item in zip(values, shape, strict=True)]
    if not isinstance(shape, str):
        return values
    if shape == "???":
        return shape
    return _remembering(values, shape) if "${" in shape else values


def _remembering(value: Any, source: str) -> Any:
    """What an interpolation stands for; of a group or a list (`${group}`) each text remembers its own place there."""
    if isinstance(value, (dict, list)):
        whole = source.removesuffix("}").rstrip()
        if whole.startswith("${."):  # relative to where it stands, which is one level further down from here on
            whole = "${." + whole.removeprefix("${")
        if isinstance(value, dict):
            return {key: _remembering(item, f"{whole}.{key}}}") for key, item in value.items()}
        return [_remembering(item, f"{whole}[{place}]}}") for place, item in enumerate(value)]
    return Interpolated(value, source) if isinstance(value, str) else value


def _from_text(cls: type, key: str, text: str) -> Any:
    """The value of a `key=text` argument: text for fields that are read from text, yaml for groups, lists and dicts."""
    hint: Any = cls
    for name in key.split("."):
        group = _group_of(hint)
        if group is None:
            if _is_open(hint):
                hint = Any
                break
            raise _unknown(cls, key)
        hints = _hints(group)
        if name not in hints:
            raise _unknown(cls, key)
        hint = hints[name]
    if not (_group_of(hint) or _is_open(hint) or _is_list(hint, text)) or text.lower() in _NULLS or "${" in text:
        return text
    return _parse_yaml(key, text)


def _parse_yaml(key: str, text: str) -> Any:
    try:
        # OmegaConf's loader rather than yaml's own: it reads 1e-6 as a number
        return OmegaConf.to_container(OmegaConf.create(f"value: {text}"))["value"]  # type: ignore[index,call-overload]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{key}={text}: not valid yaml: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# from plain values to dataclasses


class _Mismatch(Exception):
    """A value is not what its type hint says; the argument is what was expected."""


class _Reader:
    """Reads a whole tree before it complains, so that a user corrects a file once and not key by key."""

    def __init__(self, root: type) -> None:
        self.root = root
        self.unknown: list[UnknownOptionError] = []
        self.mismatched: list[str] = []
        self.missing: list[str] = []

    def raise_problems(self) -> None:
        if self.unknown:
            raise self.unknown[0] if len(self.unknown) == 1 else UnknownOptionError("\n".join(map(str, self.unknown)))
        if self.mismatched:
            raise ConfigError("\n".join(self.mismatched))
        if self.missing:
            raise ConfigError(
                f"required and not set: {', '.join(self.missing)} (give KEY=VALUE, or --help for all keys)"
            )

    def read_group(self, cls: type, given: Any, default: Any, path: str) -> dict[str, Any]:
        """Values for the fields of `cls`: given, else from the `default` instance, else the field's own default."""
        if not isinstance(given, Mapping):
            self.mismatched.append(
                f"{path.rstrip('.')}={_show(given)}: expected keys of {cls.__name__}, e.g. {_example(cls, path)}"
            )
            return {}
        hints = _hints(cls)
        for name in given:
            if name not in hints:
                self.unknown += [_unknown(self.root, key) for key in _leaves(f"{path}{name}", given[name])]
        values: dict[str, Any] = {}
        for field in _fields(cls):
            key, hint = f"{path}{field.name}", hints[field.name]
            is_left_open = isinstance(left := given.get(field.name), str) and left == "???"
            has_value = field.name in given and not is_left_open
            fallback = _default(field) if default is None else getattr(default, field.name)
            group = _group_of(hint)
            if group is not None and (has_value or fallback is dataclasses.MISSING):
                values[field.name] = self._read_nested(group, hint, given.get(field.name, {}), fallback, key)
            elif has_value:
                try:
                    values[field.name] = _convert(given[field.name], hint)
                except _Mismatch as mismatch:
                    self.mismatched.append(f"{key}={_show(given[field.name])}: expected {mismatch}")
            elif is_left_open or fallback is dataclasses.MISSING:
                self.missing.append(key)
            else:
                values[field.name] = fallback
        return values

    def _read_nested(self, group: type, hint: Any, given: Any, fallback: Any, key: str) -> Any:
        if _is_null(given) and _allows_none(hint):
            return None
        default = fallback if isinstance(fallback, group) else None
        cls = type(default) if default is not None else group
        return _Group(cls, self.read_group(cls, given, default, f"{key}."))


@dataclasses.dataclass(frozen=True)
class _Group:
    """A nested dataclass that was read but not built: it is built when the whole tree is known to be good."""

    cls: type
    values: dict[str, Any]


def _construct(cls: type[C], values: Mapping[str, Any], path: str) -> C:
    built = {
        name: _construct(value.cls, value.values, f"{path}{name}.") if isinstance(value, _Group) else value
        for name, value in values.items()
    }
    try:
        return cls(**built)
    except ValueError as error:  # raised by __post_init__, which does not know where its group stands
        message = str(error)
        if message.startswith(path):  # no path, or one that the message knows
            raise ConfigError(message) from error
        prefix = path if message.split("=")[0].split(":")[0].strip() in built else f"{path.rstrip('.')}: "
        raise ConfigError(f"{prefix}{message}") from error


def _convert(value: Any, hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(value, arguments)
    if origin is Literal:
        for choice in arguments:
            if value == choice and type(value) is type(choice):
                return choice
        for choice in arguments:
            if isinstance(value, str) and value == str(choice):
                return choice
        raise _Mismatch(_name(hint))
    if origin in (list, tuple, Sequence) or hint in (list, tuple):
        return _convert_list(value, hint, origin or hint, arguments)
    if origin in (dict, Mapping) or hint is dict:
        if not isinstance(value, Mapping):
            raise _Mismatch("a mapping such as {key: value}")
        return {key: _convert(item, arguments[1] if arguments else Any) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):  # inside a list or a dict
        if isinstance(value, Mapping):
            return from_mapping(typing.cast(type, hint), value)
        raise _Mismatch(f"keys of {_name(hint)}")
    return _convert_scalar(value, hint)


def _convert_union(value: Any, members: tuple[Any, ...]) -> Any:
    if type(None) in members and _is_null(value):
        return None
    members = tuple(member for member in members if member is not type(None))
    for member in members:  # an exact type first, so that 1 stays an int for `float | int`
        if isinstance(member, type) and type(value) is member and not isinstance(value, str):
            return value
    expected = []
    # text is tried as a number before it is taken as it stands
    for member in sorted(members, key=lambda member: member is str):
        try:
            return _convert(value, member)
        except _Mismatch as mismatch:
            expected.append(str(mismatch))
    raise _Mismatch(" or ".join(expected))


def _convert_list(value: Any, hint: Any, origin: Any, arguments: tuple[Any, ...]) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _Mismatch(f"{_name(hint)}, written [a, b]")
    make = tuple if origin is tuple else list
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            raise _Mismatch(f"{len(arguments)} values, written [a, b]")
        return tuple(_convert(item, argument) for item, argument in zip(value, arguments, strict=True))
    return make(_convert(item, arguments[0] if arguments else Any) for item in value)


def _convert_scalar(value: Any, hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        for member in hint:
            if value in (member, member.name, member.value) or str(value).lower() == member.name.lower():
                return member
    elif hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _BOOLS:
            return _BOOLS[value.lower()]
    elif hint in (int, float):
        if isinstance(value, str):
            try:
                return hint(value)
            except ValueError:
                pass
        elif not isinstance(value, bool) and isinstance(value, (int, float) if hint is float else int):
            return hint(value)
    elif hint is str:
        if isinstance(value, str):
            return value
        raise _Mismatch("a string (in yaml, quote it)")
    elif hint is Path:
        if isinstance(value, (str, Path)):
            return Path(value)
    elif isinstance(hint, type) and isinstance(value, hint):
        return value
    raise _Mismatch(_name(hint))


# ---------------------------------------------------------------------------------------------------------------------
# what a dataclass says about itself


@dataclasses.dataclass(frozen=True)
class _Key:
    path: str
    hint: Any
    default: Any
    """MISSING if required"""
    doc: str


def _keys(cls: type, default: Any = None, prefix: str = "") -> Iterator[_Key]:
    hints, docs = _hints(cls), _docs(cls)
    for field in _fields(cls):
        hint = hints[field.name]
        group = _group_of(hint)
        value = _default(field) if default is None else getattr(default, field.name)
        path = f"{prefix}{field.name}"
        if group is not None and value is not None:
            yield from _keys(group, value if isinstance(value, group) else None, f"{path}.")
            continue
        yield _Key(path, hint, value, docs.get(field.name, ""))
        if group is not None:
            yield from _keys(group, None, f"{path}.")


def _unknown(cls: type, key: str) -> UnknownOptionError:
    known = [known.path for known in _keys(cls)]
    same_leaf = [path for path in known if path.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    group, _, leaf = key.rpartition(".")
    initials = [path for path in known if _is_short_for(path.rpartition(".")[2], leaf)]
    short = [path for path in initials if path.rpartition(".")[0] == group] or initials[:3]
    if close := short or difflib.get_close_matches(key, known, n=1, cutoff=0.75) or same_leaf[:3]:
        hint = f"did you mean {' or '.join(map(repr, close))}?"
    else:
        prefix = f"{group}." if group and any(path.startswith(f"{group}.") for path in known) else ""
        siblings = {path.removeprefix(prefix).split(".")[0] for path in known if path.startswith(prefix)}
        hint = did_you_mean(key, {f"{prefix}{name}" for name in siblings})
    return UnknownOptionError(f"unknown key {key!r}; {hint}")


def _is_short_for(one: str, other: str) -> bool:
    """Whether one of two names is made of the initials of the other's words, as `lr` is of `learning_rate`."""
    return any(
        "_" in long and short == "".join(w[:1] for w in long.split("_")) for short, long in ((one, other), (other, one))
    )


def _leaves(path: str, value: Any) -> list[str]:
    if not isinstance(value, Mapping) or not value:
        return [path]
    return [leaf for name in value for leaf in _leaves(f"{path}.{name}", value[name])]


def _fields(cls: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if field.init]


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in _fields(cls)}


@functools.cache
def _docs(cls: type) -> dict[str, str]:
    """The string literal under each field, which Python itself forgets."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):  # defined where there is no file, e.g. at a prompt
            continue
        definition = typing.cast(ast.ClassDef, ast.parse(source).body[0])
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(sentence))):
                    docs[name] = " ".join(sentence.split())
    return docs


def _default(field: dataclasses.Field[Any]) -> Any:
    """The field's default, or MISSING if it is required or a group that is to be read from its own defaults."""
    if field.default is not dataclasses.MISSING:
        return field.default
    factory = field.default_factory
    if factory is dataclasses.MISSING or (isinstance(factory, type) and dataclasses.is_dataclass(factory)):
        return dataclasses.MISSING
    return factory()


def _group_of(hint: Any) -> type | None:
    """The dataclass that a hint names, `X | None` included."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    groups = [member for member in members if isinstance(member, type) and dataclasses.is_dataclass(member)]
    return groups[0] if len(groups) == 1 else None


def _is_open(hint: Any) -> bool:
    """Whether keys below a field are its user's own."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    return any(member in (Any, dict) or typing.get_origin(member) in (dict, Mapping) for member in members)


def _is_list(hint: Any, text: str) -> bool:
    members = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    if str in members and not text.startswith("["):
        return False
    return any(member in (list, tuple) or typing.get_origin(member) in (list, tuple, Sequence) for member in members)


def _allows_none(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in _NULLS)


def _example(cls: type, path: str) -> str:
    return f"{path}{_fields(cls)[0].name}=..."


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Interpolated):
        return value.source
    return value if isinstance(value, str) else repr(value)


def _name(hint: Any) -> str:
    """A type hint in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        named = [_name(member) for member in arguments if member is not type(None)]
        return " or ".join([*named, "null"] if type(None) in arguments else named)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(member.name for member in hint)
    if origin in (list, tuple, Sequence) and arguments:
        return f"a list of {_name(arguments[0]).removeprefix('a ').removeprefix('an ')}"
    words = {
        bool: "true or false",
        int: "an int",
        float: "a float",
        str: "a str",
        Path: "a path",
        Any: "anything",
        list: "a list",
        tuple: "a list",
        dict: "a mapping",
    }
    key = origin or hint
    return words.get(key, getattr(hint, "__name__", str(hint)))
