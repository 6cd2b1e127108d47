"""The text of `--help`, hints in messages on a config, and names of groups of options."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rlite import output
from rlite.errors import ConfigError, UnknownOptionError, did_you_mean

ENTRY = "NAME"
"""part of a key that stands for the name of one of several entries"""


def wrapped(line: str) -> list[str]:
    """Return the lines of a long line."""
    return textwrap.wrap(line, output.columns(116), subsequent_indent="    ")


def text(
    keys: Mapping[str, str], titles: Mapping[str, str], first: Sequence[str], usage: list[str], topic: str, command: str
) -> str:
    """Return the text of `--help`, or the part on one topic.

    `titles`: title of each group, such as "actor"; "" is the group of the keys without one. `topic`: a group, whose
    groups below it are included, or a key; "" is everything. `command`: name of the command with a space after it; ""
    is unknown.
    """
    groups: dict[str, list[str]] = {}
    for key in keys if any("." in key for key in keys) else dict.fromkeys([*first, *keys]):
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

    `default`: its default, as an argument.
    """
    lines = textwrap.wrap(sentence, output.columns(112), initial_indent="    ", subsequent_indent="    ")
    return "\n".join([f"{key}={default}  ({kind})", *lines])


def _section(title: str, keys: Iterable[str]) -> str:
    return "\n".join([f"[{title.rstrip('.')}]", *keys])


def _nearest(topic: str, groups: Sequence[str], keys: Sequence[str]) -> str:
    """Return a hint for an unknown topic: names that end with it, else a near one, else all groups."""
    known = list(dict.fromkeys([*groups, *keys]))
    if same := [name for name in known if name.rpartition(".")[2] == topic]:
        return f"did you mean {' or '.join(map(repr, same))}?"
    return did_you_mean(topic, difflib.get_close_matches(topic, known, n=1) or groups)


MAX_SHOWN = 3
COMMAND_LINE, PROGRAM, PRESET = "command line", "argument", "the default of this preset"
"""sources of values, beside files"""
ELSEWHERE: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("steps", "max_steps", "num_steps", "total_training_steps"), ("n_epochs", "total_steps")),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "total_epochs"), ("n_epochs", "total_steps")),
    **dict.fromkeys(("save_steps", "save_interval"), ("save_freq",)),
    **dict.fromkeys(("eval_steps", "eval_freq", "eval_interval", "test_interval"), ("test_freq",)),
    **dict.fromkeys(("output_dir", "default_local_dir"), ("save_dir",)),
    **dict.fromkeys(("n", "num_generations", "rollouts_per_example"), ("responses_per_prompt",)),
    **dict.fromkeys(("max_completion_length", "max_response_length", "max_tokens"), ("max_new_tokens",)),
    **dict.fromkeys(("train_batch_size", "per_device_train_batch_size"), ("batch_size", "prompts_per_rollout")),
    **dict.fromkeys(("num_iterations", "ppo_epochs"), ("update_per_rollout",)),
    "report_to": ("sinks",),
    "kl_coef": ("coef",),
    "model": ("model_name",),
}
"""names of options in TRL, verl and prime-rl -> the last parts of the keys that they mean here, the best first"""

_PAIRS = {"data": "train_data", "n_epochs": "total_steps"}
OTHER_COMMANDS: Mapping[str, str] = _PAIRS | {other: own for own, other in _PAIRS.items()}
"""parts of keys of one command -> the parts with the same purpose in another command"""


def nearest_key(key: str, known: Sequence[str], usual: Collection[str] = ()) -> str:
    """Return a hint for the end of a message: the keys that are probably meant, or all keys of the group."""
    same = ".".join(OTHER_COMMANDS.get(part, part) for part in key.split("."))
    if same != key and (meant := [path for path in (same, f"{same}.path") if path in known]):
        return _any_of(meant)
    group, _, leaf = key.rpartition(".")
    for name in ELSEWHERE.get(leaf, ()):
        if meant := _same_leaf(name, known, usual):
            return _any_of(meant)
    siblings = [path for path in known if path.rpartition(".")[0] == group]
    if close := _short_for(leaf, siblings) or _with_words(leaf, siblings, usual) or _short_for(leaf, known)[:MAX_SHOWN]:
        return _any_of(close)
    if close := difflib.get_close_matches(key, known, n=1, cutoff=0.75) or _same_leaf(leaf, known, usual):
        return _any_of(close)
    prefix = f"{group}." if group and any(path.startswith(f"{group}.") for path in known) else ""
    names = {path.removeprefix(prefix).split(".")[0] for path in known if path.startswith(prefix)}
    return did_you_mean(key, {f"{prefix}{name}" for name in names})


def set_by(message: str, group: str, sources: Mapping[str, str]) -> str:
    """Return which options of a message a file or a preset has set, as its end; "" if the user's command has."""
    found = []
    for key, source in sorted(sources.items()):
        own = f"({re.escape(key)}\\b|{re.escape(key.removeprefix(f'{group}.'))}=)"
        if source not in (COMMAND_LINE, PROGRAM) and re.search(rf"(?<![\w.]){own}", message):
            found.append(f"{key}: {'' if source == PRESET else 'set by '}{source}")
    return f" ({'; '.join(found)})" if found else ""


def _any_of(keys: Sequence[str]) -> str:
    return f"did you mean {' or '.join(map(repr, keys))}?"


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _same_leaf(leaf: str, known: Sequence[str], usual: Collection[str]) -> list[str]:
    return _usual([path for path in known if _leaf(path) == leaf], usual)


def _usual(keys: Sequence[str], usual: Collection[str]) -> list[str]:
    return ([path for path in keys if path in usual] or list(keys))[:MAX_SHOWN]


def _with_words(leaf: str, known: Sequence[str], usual: Collection[str]) -> list[str]:
    """Return the keys whose words include those of a name, as `total_steps` includes `steps`; the usual ones if any."""
    return _usual([path for path in known if {*leaf.split("_")} < {*_leaf(path).split("_")}], usual)


def _short_for(leaf: str, known: Sequence[str]) -> list[str]:
    """Return the keys that abbreviate a name by the initials of its words, as `lr` does, or that it abbreviates."""
    return [path for path in known if _is_short_for(_leaf(path), leaf) or _is_short_for(leaf, _leaf(path))]


def _is_short_for(short: str, long: str) -> bool:
    return "_" in long and short == "".join(word[:1] for word in long.split("_"))


UNNAMED = ""
"""name of a group that its user did not name"""
_NAME = re.compile(r"\w[\w-]*")


def single_or_named(schema: dict[str, Any]) -> None:
    """Let the JSON schema of groups by name also take the options of a single group, as `json_schema_extra`.

    The single group has the name UNNAMED. Its keys are those of the option itself: `test_data.path`.
    """
    named = next(form for form in schema["anyOf"] if "additionalProperties" in form)
    schema["anyOf"].insert(0, named["additionalProperties"])


def check_name(key: str, name: str, options: Collection[str] = ()) -> None:
    """Check the name of one of several groups.

    `name`: the name; UNNAMED is one.
    """
    if name in options or (name != UNNAMED and not _NAME.fullmatch(name)):
        none_of = f"; it is none of its options ({', '.join(options)})" if options else ""
        raise ConfigError(f"{key}.{name}: a name has letters, digits, _ and -, and does not begin with -{none_of}")


def by_name(given: Any, key: str, is_plain: Mapping[str, bool], group: type) -> Any:
    """Return groups by name. The options of a single group get the name UNNAMED.

    `is_plain`: whether an option of a group takes no mapping, by its name; each group needs the first option.
    """
    first = next(iter(is_plain))
    if isinstance(given, str):
        raise ConfigError(f"{key}={given}: expected {key}.{first}={given}")
    if not isinstance(given, Mapping):
        return given
    named = [name for name, value in given.items() if isinstance(value, Mapping | group) and is_plain.get(name, True)]
    single = [name for name in given if name not in named]
    for name in single:
        is_first = ":" in str(given[name]) and not difflib.get_close_matches(str(name), [first])
        if is_first and name not in is_plain:
            raise ConfigError(f"{key}.{name}={given[name]}: expected {key}.{name}.{first}={given[name]}")
    if named and single:
        mixed = f"{key}.{single[0]} is of a group without a name, and {key}.{named[0]} has one"
        raise ConfigError(f"{mixed}: give each its name, as in {key}.NAME.{single[0]}")
    for name in named:
        check_name(key, str(name), is_plain)
    if len(named) > 1 and UNNAMED in named:
        raise ConfigError(f"{key}: one of several has no name; expected {key}.NAME.{first} of each")
    return {UNNAMED: given} if single else given
