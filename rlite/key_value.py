"""Arguments as `KEY=VALUE`: other spellings of them, and the pairs of key and text. `rlite.config` gives them types."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from rlite.errors import ConfigError

_FLAGS = ("config", "import", "help")
_KEY = re.compile(r"[A-Za-z_][\w.]*=")


def named(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the arguments, with keys added to the first arguments that have none, in the order of `names`.

    With the names `model` and `prompt`, `["runs/sft", "2+3=", "n=4"]` is `["model=runs/sft", "prompt=2+3=", "n=4"]`.
    A text without a key is literal: `${...}` in it is no interpolation.
    """
    left = list(names)
    return [
        f"{left.pop(0)}={argument}".replace("${", r"\${") if is_positional and left else argument
        for argument, is_positional in _classified(argv)
    ]


def spelled(argv: Sequence[str], spellings: Mapping[str, str]) -> list[str]:
    """Return the arguments with `--NAME VALUE`, `--NAME=VALUE` and `NAME=VALUE` as `KEY=VALUE`.

    With the spellings `{"data": "data.path"}`, `["--data", "test.jsonl"]` is `["data.path=test.jsonl"]`. A value in
    braces belongs to the whole group, so its name stays. Keys inside of a group stay, too: `--data.columns VALUE`.
    """
    made, rest = [], iter(argv)
    for argument in rest:
        name, equals, value = argument.removeprefix("--").partition("=")
        is_flag = argument.startswith("--")
        key = spellings.get(name) or (name if name.partition(".")[0] in spellings else None)
        nearest = difflib.get_close_matches(name, [*spellings, *_FLAGS], n=1)
        if key is None and is_flag and name not in _FLAGS and nearest:
            raise ConfigError(f"argument '--{name}': no such option; did you mean '--{nearest[0]}'?")
        if key is None or not (is_flag or equals) or (name in spellings and value.startswith("{")):
            made.append(argument)
            continue
        if not equals and (found := next(rest, None)) is None:
            raise ConfigError(f"--{name}: expected a value after it")
        made.append(f"{key}={value if equals else found}")
    return made


def split_positional(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without a key, and the others."""
    found = [*_classified(argv)]
    return [argument for argument, is_own in found if is_own], [argument for argument, is_own in found if not is_own]


def _classified(argv: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield each argument, and whether it is one without a key."""
    rest = iter(argv)
    for argument in rest:
        yield argument, not (argument.startswith("-") or _KEY.match(argument))
        if argument in ("--config", "--import"):
            yield from ((file, False) for file in itertools.islice(rest, 1))


def split_arguments(argv: Sequence[str], has_imports: bool) -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    """Return the arguments of `--config` and of `--import`, and the pairs of key and value."""
    named: dict[str, list[str]] = {"--config": [], "--import": []} if has_imports else {"--config": []}
    overrides: list[tuple[str, str]] = []
    rest = iter(argv)
    for argument in rest:
        key, equals, text = argument.partition("=")
        if key in named:
            if not equals and (text := next(rest, "")) == "":
                raise ConfigError(f"{key}: expected a {'yaml file' if key == '--config' else 'Python file'} after it")
            named[key].append(text)
        elif equals and key and not key.startswith("-"):
            overrides.append((key, text))
        else:
            forms = ["key=value", *(f"{name} FILE" for name in named)]
            raise ConfigError(f"argument {argument!r}: expected {', '.join(forms)} or --help")
    return named, overrides
