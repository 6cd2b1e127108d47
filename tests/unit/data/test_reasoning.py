from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlite.assembly.quickstart.run import impatient_demonstrations
from rlite.data.reasoning import build_problems, held_out_split, question_of
from rlite.errors import ConfigError, DataError


def test_problems_are_distinct_and_depend_on_the_seed_alone() -> None:
    rows = build_problems("spell_backward", 300, seed=1, max_word_len=7)
    assert len({question_of(row).casefold() for row in rows}) == len(rows) == 300
    assert rows == build_problems("spell_backward", 300, seed=1, max_word_len=7)
    assert rows != build_problems("spell_backward", 300, seed=2, max_word_len=7)
    assert max(len(row["answer"]) for row in rows) == 7


def test_excluded_questions_do_not_occur_in_any_case() -> None:
    rows = build_problems("spell_backward", 50, seed=1)
    others = build_problems("spell_backward", 50, seed=1, exclude=[question_of(row).upper() for row in rows])
    assert not {question_of(row).casefold() for row in rows} & {question_of(row).casefold() for row in others}


def test_held_out_problems_occur_nowhere_in_training_and_do_not_move_with_its_size() -> None:
    train, held_out = held_out_split("spell_backward", 400, 100, seed=3)
    assert (len(train), len(held_out)) == (400, 100)
    assert not {question_of(row).casefold() for row in train} & {question_of(row).casefold() for row in held_out}
    assert held_out_split("spell_backward", 40, 100, seed=3) == (train[:40], held_out)


def test_the_impatient_teacher_stops_early_in_the_stated_share_of_long_answers() -> None:
    rows = build_problems("spell_backward", 1000, seed=0)
    demonstrations = impatient_demonstrations(rows, seed=0, patience=4, impatience=0.6)
    cut = [demo != row["answer"] for demo, row in zip(demonstrations, rows, strict=True)]
    long = [len(row["answer"]) > 4 for row in rows]
    assert all(row["answer"].startswith(demo) for demo, row in zip(demonstrations, rows, strict=True))
    assert sum(cut) / sum(long) == pytest.approx(0.6, abs=0.05)
    assert all(len(demo) == 4 for demo, is_cut in zip(demonstrations, cut, strict=True) if is_cut)
    assert demonstrations == impatient_demonstrations(rows, seed=0, patience=4, impatience=0.6)


def test_a_task_with_too_few_problems_says_so() -> None:
    with pytest.raises(DataError, match=r"lcm gave 2[0-9] distinct problems in 5000 draws, but 100"):
        build_problems("lcm", 100, seed=0, min_value=1, max_value=5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("spell_backwards", {}, "did you mean 'spell_backward'"),
        ("spell_backward", {"max_len": 3}, "max_len"),
        ("spell_backward", {"min_word_len": 0}, "must be positive"),
    ],
)
def test_an_unknown_task_or_option_is_a_config_error(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_problems(name, 1, seed=0, **options)


def test_without_reasoning_gym_the_error_names_the_extra() -> None:
    program = """
import sys
sys.modules["reasoning_gym"] = None  # as if it were not installed
from rlite.data.reasoning import build_problems
from rlite.errors import ConfigError
try:
    build_problems("spell_backward", 1, seed=0)
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    assert "pip install 'rlite[quickstart]'" in done.stdout


@pytest.mark.nightly
def test_the_import_shows_no_syntax_warnings_of_packages_that_are_not_compiled(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", "import rlite.data.reasoning"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
