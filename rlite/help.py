"""The text of `--help`: the usual keys, then all keys by group, or the keys of one group."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlite.errors import UnknownOptionError, did_you_mean

ENTRY = "NAME"
"""part of a key that stands for the name of one of several entries"""


@dataclass(frozen=True, kw_only=True)
class Manual:
    """The options of a command in words."""

    keys: Mapping[str, str]
    """the lines of each key, such as "actor.lr" """
    titles: Mapping[str, str]
    """title of each group, such as "actor"; "" is the group of the keys without one"""
    first: Sequence[str]
    """keys that come before the groups, or before the other keys if there are no groups"""
    options: str
    """forms of the arguments"""
    example: str
    """arguments of a typical call"""
    preset: str = ""
    """the call of another command that this one stands for"""

    def text(self, topic: str, command: str) -> str:
        """Return the whole text, or the part on one topic.

        Args:
            topic: a group, whose groups below it are included, or a key; "" is everything.
            command: name of the command, for the usage and the example; "" is unknown.

        Raises:
            UnknownOptionError: there is no such group and no such key. The message names the nearest.
        """
        has_groups = any("." in key for key in self.keys)
        groups: dict[str, list[str]] = {}
        for key in self.keys if has_groups else dict.fromkeys([*self.first, *self.keys]):
            groups.setdefault(key.rpartition(".")[0], []).append(self.keys[key])
        asked = {name: own for name, own in groups.items() if not topic or f"{name}.".startswith(f"{topic}.")}
        # the keys of one of several entries are those of a single entry
        chosen = {
            name: own for name, own in asked.items() if name.replace(f".{ENTRY}", "") not in asked.keys() - {name}
        }
        if not chosen and topic not in self.keys:
            hint = _nearest(topic, [name for name in groups if name], list(self.keys))
            raise UnknownOptionError(f"--help {topic}: no such group or key; {hint}")
        sections = [_section(self.titles[name], own) for name, own in chosen.items()]
        if topic:
            return "\n\n".join([*([self.keys[topic]] if topic in self.keys else []), *sections])
        first = [_section("common options", [self.keys[key] for key in self.first])] if len(groups) > 1 else []
        return "\n\n".join([self._usage([name for name in groups if name], command), *first, *sections])

    def _usage(self, groups: Sequence[str], command: str) -> str:
        name = f"{command} " if command else ""
        lines = [f"usage: {name}{self.options}"]
        if self.preset:
            lines += textwrap.wrap(f"preset: {self.preset}", 116, subsequent_indent="    ")
        if self.example:
            lines.append(f"example: {name}{self.example}")
        if groups:
            named = f"one group: {name}--help GROUP, of {', '.join(groups)}"
            lines += textwrap.wrap(named, 116, subsequent_indent="    ")
        return "\n".join(lines)


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
