"""Yaml texts: files and values of arguments as plain trees, and configs as files. `rlite.config` gives them types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml.error import MarkedYAMLError

from rlite import files
from rlite.errors import ConfigError

NULLS = ("null", "none", "~")
_UNREADABLE = (
    *(yaml.YAMLError, OmegaConfBaseException, OSError),
    *(ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError),
)
"""errors of yaml and OmegaConf for a text or a file that they cannot read"""
_MAX_SAVED = 2**18
"""bytes of the largest saved config that is read"""


def read_yaml(file: str) -> DictConfig:
    """Return the mapping in a yaml file."""
    try:
        loaded = OmegaConf.load(file)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid yaml: {error}") from error
    except _UNREADABLE as error:
        raise ConfigError(f"{file}: {_reason(error)}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{file}: expected a mapping of keys to values, found a list")
    return loaded


class _SavedLoader(yaml.SafeLoader):
    """Loader without aliases, which `to_yaml` never writes: a few of them can stand for more than memory holds."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()
            raise MarkedYAMLError(problem=f"found the alias *{event.anchor}", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_yaml_int(self, node: yaml.Node) -> int:
        number: int = super().construct_yaml_int(node)
        str(number)  # raises ValueError for a number too long to be shown, which hexadecimal digits may mean
        return number


_SavedLoader.add_constructor("tag:yaml.org,2002:int", _SavedLoader.construct_yaml_int)


def read_saved(file: Path) -> dict[str, Any]:
    """Return the config that a run has saved in its folder. The file may come from anyone."""
    try:
        with files.reading(file) as stream:
            content = stream.read(_MAX_SAVED + 1)
        if len(content) > _MAX_SAVED:
            raise ConfigError(f"{file.name}: cannot be read: it has more than {_MAX_SAVED} bytes")
        found = yaml.load(content, _SavedLoader)
    except (FileNotFoundError, ConfigError):
        raise
    except _UNREADABLE as error:
        raise ConfigError(f"{file.name}: cannot be read: {_reason(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file.name}: not the config of a run")
    return found


def _reason(error: Exception) -> str:
    """Return in one line why a file or a text cannot be read."""
    if isinstance(error, RecursionError):
        return "the values are nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error.reason} at byte {error.start}"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"not valid yaml: {error.problem}, in line {error.problem_mark.line + 1}"
    name = "" if isinstance(error, yaml.YAMLError) else f"{type(error).__name__}: "
    return f"not valid yaml: {name}{(str(error).splitlines() or [''])[0]}"


def read_value(key: str, text: str) -> Any:
    """Return the value of an argument that is written in yaml. `null` and interpolations stay texts."""
    if text.lower() in NULLS or "${" in text:
        return text
    try:
        # OmegaConf's loader rather than yaml's own: it reads 1e-6 as a number
        return OmegaConf.to_container(OmegaConf.create(f"value: {text}"))["value"]  # type: ignore[index,call-overload]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{key}={text}: not valid yaml: {error}") from error
    except _UNREADABLE as error:
        raise ConfigError(f"{key}={shown(text)}: {_reason(error)}") from error


def with_aliases(tree: DictConfig, aliases: Mapping[str, str]) -> DictConfig:
    """Return a tree in which the keys take the place of their aliases."""
    for alias, key in aliases.items():
        *groups, leaf = alias.split(".")
        parent = OmegaConf.select(tree, ".".join(groups)) if groups else tree
        if isinstance(parent, DictConfig) and leaf in parent:
            if OmegaConf.select(tree, key) is not None:
                raise ConfigError(f"{alias} is an alias of {key}: give only one of them")
            OmegaConf.update(tree, key, parent.pop(leaf))
            while groups and not OmegaConf.select(tree, ".".join(groups)):  # groups that only the alias needed
                leaf = groups.pop()
                (OmegaConf.select(tree, ".".join(groups)) if groups else tree).pop(leaf)
    return tree


def merged(tree: DictConfig, read: DictConfig, file: str, first: str) -> DictConfig:
    """Return a tree with the values of one more file, which replace earlier values."""
    try:
        return cast(DictConfig, OmegaConf.merge(tree, read))
    except TypeError as error:
        raise ConfigError(f"{file}: a key is a mapping here and a list in {first}") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: {_reason(error)}") from error


def enter(tree: DictConfig, key: str, value: Any, source: str) -> None:
    """Write a value into a tree. A mapping is merged into the mapping that is there.

    `source`: place of the present value, for the message.
    """
    try:
        OmegaConf.update(tree, key, value, merge=isinstance(value, dict))
    except OmegaConfBaseException:
        raise
    except ValueError as error:  # items of a list have numbers for names
        raise ConfigError(f"{key}: a list has no such key{source}; expected keys of a group") from error


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes every text that looks like a number: OmegaConf reads more numbers than yaml does.

    An object that appears twice is written twice: `read_saved` reads no aliases.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        float(text)
    except ValueError:
        return dumper.represent_str(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'")


_Dumper.add_representer(str, _represent_text)


def to_yaml(container: Mapping[str, Any]) -> bytes:
    """Return plain values as yaml that `read_yaml` and `read_saved` read back as equal values."""
    return yaml.dump(container, Dumper=_Dumper, sort_keys=False, allow_unicode=True).encode()


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by their whole keys, such as `trainer.seed`."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def shown(value: Any) -> str:
    """Return the value of an option for a message, cut if it is long."""
    text = "null" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


MAX_SHOWN = 8
"""differences that a message names"""
NOT_SET = "nothing"


def differences(there: Mapping[str, Any], here: Mapping[str, Any], keys: Iterable[str] | None = None) -> list[str]:
    """Return the values that differ, with both of them.

    `keys`: keys to compare; default: all.
    """
    compared = dict.fromkeys([*there, *here]) if keys is None else keys
    pairs = [(key, there.get(key, NOT_SET), here.get(key, NOT_SET)) for key in compared]
    return [f"{key}: {shown(a)} there, {shown(b)} here" for key, a, b in pairs if a != b]


def some_of(different: Sequence[str]) -> str:
    """Return the first differences in a line, and the number of the others."""
    more = [f"and {len(different) - MAX_SHOWN} more"] if len(different) > MAX_SHOWN else []
    return "; ".join([*different[:MAX_SHOWN], *more])
