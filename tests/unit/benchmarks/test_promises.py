"""The table of promises counts each file of the library once, and docs/why-rlite.md holds to its own rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.promises import PROMISES, ROOT, main, promise_of

PAGE = ROOT / "docs" / "why-rlite.md"
SOURCES = ("`", "](", "][")
"""what a cell about another library has that names its source"""


def test_every_folder_of_a_promise_has_modules() -> None:
    folders = [folder for own in PROMISES.values() for folder in own]
    assert len(folders) == len(set(folders)), "a folder belongs to one promise"
    assert [folder for folder in folders if not list((ROOT / "rlite" / folder).glob("*.py"))] == []


def test_every_promise_holds_a_file_and_stands_on_the_page() -> None:
    files = [str(path.relative_to(ROOT / "rlite")) for path in (ROOT / "rlite").rglob("*.py")]
    assert {promise_of(file) for file in files} == PROMISES.keys()
    told = PAGE.read_text(encoding="utf-8")
    assert [promise for promise in PROMISES if f"| {promise} | " not in told] == []


def test_a_file_belongs_to_the_deepest_folder() -> None:
    assert promise_of("trainer/run/resume.py") == promise_of("services/recovery/record.py")
    assert promise_of("trainer/run/resume.py") != promise_of("trainer/ppo.py")
    assert promise_of("config.py") == promise_of("assembly/commands/plan.py")


@pytest.mark.nightly
def test_the_command_prints_the_table_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in printed[2:-1]] == [f"| {promise}" for promise in PROMISES]
    told = PAGE.read_text(encoding="utf-8").splitlines()
    assert printed[0] in told
    places = [line.rpartition(" | ")[2] for line in printed]
    assert [place for place in places if not any(line.endswith(place) for line in told)] == []


def test_the_command_counts_lines_of_code_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.py").write_text('"""Text."""\n\n# a comment\nx = 1\n')
    main([str(tmp_path)])
    assert capsys.readouterr().out.endswith(": 1 source lines in 1 files\n")


def test_every_cell_about_another_library_has_a_source_or_is_not_checked() -> None:
    *_, table = re.findall(r"(?:^\|.*\n){8,}", PAGE.read_text(encoding="utf-8").partition("## What they do")[0], re.M)
    head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
    assert len(head) == 8
    assert all(len(row) == 8 for row in rows)
    bare = [
        (row[0], cell)
        for row in rows
        if row[0] != "source lines"  # counted by the command below the table
        for cell in row[2:]
        if cell != "not checked" and not any(mark in cell for mark in SOURCES)
    ]
    assert bare == []
