"""The text of `--help`: the usual keys, then all keys by group, or the keys of one group."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from rlite.errors import UnknownOptionError, did_you_mean

ENTRY = "NAME"
"""part of a key that stands for the name of one of several entries"""


def wrapped(line: str) -> list[str]:
    """Return the lines of a long line."""
    return textwrap.wrap(line, 116, subsequent_indent="    ")


def text(
    keys: Mapping[str, str], titles: Mapping[str, str], first: Sequence[str], usage: list[str], topic: str, command: str
) -> str:
    """Return the text of `--help`, or the part on one topic.

    Args:
        keys: the lines of each key, such as "actor.lr".
        titles: title of each group, such as "actor"; "" is the group of the keys without one.
        first: keys that come before the groups, or before the other keys if there are no groups.
        usage: lines that come before all keys.
        topic: a group, whose groups below it are included, or a key; "" is everything.
        command: name of the command with a space after it; "" is unknown.

    Raises:
        UnknownOptionError: there is no such group and no such key. The message names the nearest.
    """
    has_groups = any("." in key for key in keys)
    groups: dict[str, list[str]] = {}
    for key in keys if has_groups else dict.fromkeys([*first, *keys]):
        groups.setdefault(key.rpartition(".")[0], []).append(keys[key])
    asked = {name: own for name, own in groups.items() if not topic or f"{name}.".startswith(f"{topic}.")}
    # the keys of one of several entries are those of a single entry
    chosen = {name: own for name, own in asked.items() if name.replace(f".{ENTRY}", "") not in asked.keys() - {name}}
    named = [name for name in groups if name]
    if not chosen and topic not in keys:
        raise UnknownOptionError(f"--help {topic}: no such group or key; {_nearest(topic, named, list(keys))}")
    sections = [_section(titles[name], own) for name, own in chosen.items()]
    if topic:
        return "\n\n".join([*([keys[topic]] if topic in keys else []), *sections])
    others = wrapped(f"one group: {command}--help GROUP, of {', '.join(named)}") if named else []
    common = [_section("common options", [keys[key] for key in first])] if len(groups) > 1 else []
    return "\n\n".join(["\n".join([*usage, *others]), *common, *sections])


def help_topic(argv: Sequence[str]) -> str | None:
    """Return the group that `--help GROUP` asks for, "" for `--help` alone, and None without it."""
    at = next((index for index, argument in enumerate(argv) if argument in ("--help", "-h")), None)
    if at is None:
        return None
    following = argv[at + 1] if at + 1 < len(argv) else ""
    return "" if "=" in following or following.startswith("-") else following


def described(key: str, default: str, kind: str, sentence: str) -> str:
    """Return the lines of a key.

    Args:
        key: such as "actor.lr".
        default: its default, as an argument.
        kind: its type and limits in words.
        sentence: its meaning.
    """
    lines = textwrap.wrap(sentence, 112, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([f"{key}={default}  ({kind})", *lines])


def _section(title: str, keys: Iterable[str]) -> str:
    return "\n".join([f"[{title.rstrip('.')}]", *keys])


def _nearest(topic: str, groups: Sequence[str], keys: Sequence[str]) -> str:
    """Return a hint for an unknown topic: names that end with it, else a near one, else all groups."""
    known = list(dict.fromkeys([*groups, *keys]))
    if same := [name for name in known if name.rpartition(".")[2] == topic]:
        return f"did you mean {' or '.join(map(repr, same))}?"
    return did_you_mean(topic, difflib.get_close_matches(topic, known, n=1) or groups)
