"""Rows of a program that are streamed: found again by their numbers, and the program's errors named by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rlite.data.readers.streaming import ProgramRows, open_files
from rlite.data.source import Source
from rlite.errors import ConfigError, DataError

ROWS: list[dict[str, Any]] = [{"n": number} for number in range(50)]


class Produced:
    """Rows that are made when they are asked for, and counted."""

    def __init__(self, *rows: Any) -> None:
        self.rows = rows
        self.num_made = 0

    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            self.num_made += 1
            if isinstance(row, Exception):
                raise row
            yield row


@pytest.mark.parametrize("rows", [ROWS, Produced(*ROWS)])
def test_rows_are_read_in_windows_and_again_by_their_numbers(rows: Any) -> None:
    [file] = open_files(Source("-", rows=rows))
    first, place = file.read_from(0, 20)
    second, place = file.read_from(place, 40)
    assert first + second == list(enumerate(ROWS))
    assert file.read_from(place, 40) == ([], 50)
    assert file.read([0, 3, 21, 49]) == [ROWS[number] for number in (0, 3, 21, 49)]
    assert file.read_from(7, 2)[0] == [(7, ROWS[7]), (8, ROWS[8])]
    with pytest.raises(DataError, match="data, row index 50: no such row"):
        file.read([3, 50])


def test_rows_are_made_once_while_they_are_read_in_order() -> None:
    rows = Produced(*ROWS)
    file = ProgramRows(rows, "data")
    place = 0
    for _ in range(10):
        _, place = file.read_from(place, 5)
    assert (place, rows.num_made) == (50, 50)
    file.read([0, 30])
    file.read_from(35, 5)
    assert rows.num_made == 50 + 40


def test_rows_that_cannot_be_streamed_are_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.streaming=true iterates the rows again.*generator.*from_generator"):
        ProgramRows((row for row in ROWS), "data")
    file = ProgramRows(Produced({"n": 0}, {"n": 1}, ValueError("no line")), "data")
    for _ in range(2):
        with pytest.raises(DataError, match=r"^data, row index 2: ValueError: no line$"):
            file.read_from(0, 9)
    with pytest.raises(DataError, match=r"^data, row index 1: expected a dict of columns, found a text"):
        ProgramRows([{"n": 0}, "a"], "data").read_from(0, 9)  # type: ignore[list-item]
