"""Some of the benchmark's hostile folders, in this process: the commands end with one line."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlite
from benchmarks.hostile_models import COMMANDS, EDITS, Ending, prepare
from rlite.cli import main


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    prepare(folder)
    return folder


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    yield
    rlite.shutdown()


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("pipe as config.json", "plan"),
        ("config with many layers", "plan"),
        ("template loops", "sft"),
        ("added tokens", "sft"),
        ("weights of fp8", "sft"),
        ("device as tokenizer.json", "grpo"),
        ("index outside", "generate"),
        ("pipe as model.safetensors", "eval"),
        ("nested JSON as config.json", "merge"),
    ],
)
def test_a_hostile_folder_ends_a_command_with_one_line(
    name: str, command: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(sound, tmp_path / "case")
    EDITS[name](folder / "model")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["rlite", command, *COMMANDS[command]])
    with pytest.raises(SystemExit) as ended:
        main()
    assert str(ended.value).startswith(f"rlite {command}: ")
    assert not Ending(1, 0.0, str(ended.value)).is_bad
