"""Each command of `docs/known-failures.md` names a command, options, files and tests that exist."""

from __future__ import annotations

import ast
import contextlib
import re
import shlex
from pathlib import Path

import pytest

from rlite import config
from rlite.cli import COMMANDS
from rlite.errors import ConfigError, UnknownOptionError
from rlite.key_value import spelled, split_positional
from rlite.trainer.options import AnnouncedOptions

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "failures"
SECTIONS = re.split(r"^### ", (ROOT / "docs" / "known-failures.md").read_text(), flags=re.MULTILINE)[1:]
REFUSED = {
    "A misspelled option does nothing": UnknownOptionError,
    "A KL estimator in the loss has the wrong gradient": ConfigError,
    "Greedy sampling gives equal answers": ConfigError,
}
"""failures that the options themselves show -> the error"""


def command_of(section: str) -> list[str]:
    """Return the words of the one command of a section."""
    ((command,),) = [block.splitlines() for block in re.findall(r"```bash\n(.*?)\n```", section, re.DOTALL)]
    return shlex.split(command)


COMMANDS_SHOWN = {section.partition("\n")[0]: command_of(section) for section in SECTIONS}


def test_the_page_has_at_least_25_failures_with_different_names() -> None:
    assert len(SECTIONS) == len(COMMANDS_SHOWN) >= 25


@pytest.mark.parametrize("title", [name for name, words in COMMANDS_SHOWN.items() if words[0] == "rlite"])
def test_a_command_names_options_that_exist(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, name, *arguments = COMMANDS_SHOWN[title]
    monkeypatch.chdir(FILES)
    options = COMMANDS[name].find_options()
    if issubclass(options, AnnouncedOptions):
        arguments = options.arguments(arguments)
    elif name == "view":
        _, arguments = split_positional(spelled(arguments, {field: field for field in options.model_fields}))
    with pytest.raises(REFUSED[title]) if title in REFUSED else contextlib.nullcontext():
        config.load(options, arguments)


@pytest.mark.parametrize("title", [name for name, words in COMMANDS_SHOWN.items() if words[0] == "rlite"])
def test_a_command_names_files_that_exist(title: str) -> None:
    words = " ".join(COMMANDS_SHOWN[title])
    named = re.findall(r"[\w./-]+\.(?:py|yaml|jsonl|html)\b", words)
    assert [name for name in named if not name.startswith("runs/") and not (FILES / name).exists()] == []
    for file, function in re.findall(r"(\w+\.py):(\w+)", words):
        assert function in functions(FILES / file)


@pytest.mark.parametrize("title", [name for name, words in COMMANDS_SHOWN.items() if words[0] == "python"])
def test_a_command_names_tests_that_exist(title: str) -> None:
    python, _, pytest_, file, *chosen = COMMANDS_SHOWN[title]
    assert (python, pytest_) == ("python", "pytest")
    names = [name for name in functions(ROOT / file) if name.startswith("test_")]
    assert names
    if chosen:
        option, words = chosen
        assert option == "-k"
        assert [word for word in words.split(" or ") if not any(word in name for name in names)] == []


def functions(file: Path) -> set[str]:
    """Return the names of a file's functions."""
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
