"""The budgets of the GPU rehearsal have their form, and its page shows the recorded figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools.mock_gpu import record
from tools.mock_gpu.record import exceeded, read_budgets, read_record, shown, with_tables

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu_rehearsal.md"
PROGRAMS = {path.stem for path in (ROOT / "tools" / "mock_gpu" / "programs").glob("*.py")} - {"__init__", "models"}


def test_every_budget_is_of_a_program_and_of_a_figure_that_was_recorded() -> None:
    budgets, recorded = read_budgets(), read_record("now")
    assert recorded is not None
    assert {figure.partition(": ")[0] for figure in budgets} == PROGRAMS
    assert sorted(budgets.keys() - recorded.figures.keys()) == []


def test_the_recorded_figures_are_within_the_budgets() -> None:
    recorded = read_record("now")
    assert recorded is not None
    assert list(exceeded(read_budgets(), recorded.figures, PROGRAMS)) == []


@pytest.mark.parametrize("figure", ["capture violations", "MiB after release"])
def test_captures_and_releases_have_budgets(figure: str) -> None:
    assert any(name.endswith(f": {figure}") for name in read_budgets())


def test_nothing_is_allocated_in_steady_state() -> None:
    steady = [most for figure, most in read_budgets().items() if re.search("mallocs of a (burst|microbatch)", figure)]
    assert steady
    assert set(steady) == {0}


def test_the_page_shows_the_recorded_figures() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, "run python -m tools.mock_gpu.record"


def test_a_figure_above_its_budget_or_missing_is_reported_for_programs_that_ran() -> None:
    budgets = {"a: waits": 2, "a: copies": 1, "b: waits": 0}
    assert list(exceeded(budgets, {"a: waits": 3.25}, ["a"])) == [
        "a: waits: 3.25, and the budget is 2",
        "a: copies: no such figure, and the budget is 1",
    ]


@pytest.mark.parametrize(
    ("figures", "found"), [({"waits": 1}, "waits"), ({"a: waits": -1}, "-1"), ({"a: waits": "2"}, "'2'")]
)
def test_a_budget_of_another_form_is_refused(
    figures: dict[str, object], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "BUDGETS", tmp_path / "budgets.json")
    record.BUDGETS.write_text(json.dumps(figures))
    with pytest.raises(ValueError, match=re.escape(found)):
        read_budgets()


def test_figures_are_shown_with_three_digits_and_whole_numbers_whole() -> None:
    assert [shown(value) for value in (3.0, 12345, 0.12345, 1234.5)] == ["3", "12,345", "0.123", "1,234"]
