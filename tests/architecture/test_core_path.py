"""The core path of a GRPO step is short enough to be read in an hour, and the page that lists it is true."""

from __future__ import annotations

import pytest

from benchmarks.core_path import ROOT, lines_of, listed, sentence_of, trace

MAX_FILES, MAX_LINES = 25, 3_500
"""limits of the core path: files, and their source lines"""


@pytest.fixture(scope="module")
def path() -> dict[str, int]:
    """Source lines of each file that a step enters."""
    return lines_of(ROOT, trace(ROOT))


@pytest.mark.slow
def test_the_page_lists_the_files_that_a_step_enters(path: dict[str, int]) -> None:
    assert sorted(listed()) == sorted(path), "run: python -m benchmarks.core_path --docs"


@pytest.mark.slow
def test_the_core_path_has_few_files(path: dict[str, int]) -> None:
    assert len(path) <= MAX_FILES


@pytest.mark.slow
def test_the_core_path_has_few_lines(path: dict[str, int]) -> None:
    assert sum(path.values()) <= MAX_LINES


def test_every_listed_file_has_the_first_sentence_of_its_docstring() -> None:
    page = (ROOT / "docs" / "read-the-core.md").read_text(encoding="utf-8")
    told = [f"`rlite/{file}`: {sentence_of(ROOT / 'rlite' / file)}\n" for file in listed()]
    assert [line for line in told if line not in page] == [], "run: python -m benchmarks.core_path --docs"
