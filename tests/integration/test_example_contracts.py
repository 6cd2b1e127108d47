"""The programs of `examples/contracts/` run as printed, but for a small model, one step and short answers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlite
from rlite.runtime.sandbox.pool import close_shared_pool
from tests.doors.programs import FOLDER, make_model, train
from tests.games import PEERS

PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))
OF_DOORS = {"openenv_echo", "ors_quiz", "verifiers_words"}
"""programs that need packages of `make test-doors`, which runs them"""
NEEDS = {"messages_agent": "anthropic", "textarena_game": "textarena"}
"""packages of programs"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield make_model(tmp_path_factory.mktemp("models") / "tiny")
    rlite.shutdown()
    close_shared_pool()


@pytest.mark.parametrize("program", [each for each in PROGRAMS if each not in OF_DOORS])
def test_a_program_trains(program: str, model: str, tmp_path: Path) -> None:
    if program == "gem_game" and not (PEERS / "gem").is_dir():
        pytest.skip(f"gem is not in {PEERS}: `make test` installs it")
    if program in NEEDS and importlib.util.find_spec(NEEDS[program]) is None:
        pytest.skip(f"{NEEDS[program]} is not installed")
    train(program, model, tmp_path)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_at_most_thirty_lines(program: str) -> None:
    assert len((FOLDER / f"{program}.py").read_text().splitlines()) <= 30
