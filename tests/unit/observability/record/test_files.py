"""The files of a record."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlite.services.record.files import ROWS, VERSION, VERSION_KEY, path_of, record_files
from rlite.services.record.writer import write_table

ROW = {"step": 3, "group": 7, "sample": 0, "item": "0", "status": "trained", "reason": "", "reward_parts": {"a": 1.0}}


def test_a_table_comes_back_with_its_version(tmp_path: Path) -> None:
    path = write_table(tmp_path, "train", 3, "rows", pa.Table.from_pylist([ROW], schema=ROWS))
    table = pq.read_table(path)
    assert table.schema.metadata[VERSION_KEY] == str(VERSION).encode()
    row = table.to_pylist()[0]
    assert (row["group"], row["reward"], dict(row["reward_parts"])) == (7, None, {"a": 1.0})


def test_files_are_found_by_source_steps_and_kind(tmp_path: Path) -> None:
    empty = pa.Table.from_pylist([], schema=ROWS)
    write_table(tmp_path, "eval.held-out", 0, "rows", empty)
    write_table(tmp_path, "train", 3, "tokens", empty)
    (tmp_path / "record" / ".train-00000004.rows.parquet.1.partial").touch()
    (tmp_path / "record" / "train-00000001_00000002.rows.parquet").touch()
    found = [(file.source, file.first, file.last, file.kind) for file in record_files(tmp_path)]
    assert found == [("eval.held-out", 0, 0, "rows"), ("train", 1, 2, "rows"), ("train", 3, 3, "tokens")]


@pytest.mark.parametrize("name", ["grpo-20261123", "a-00000001_00000100", "-00000001", "a.rows", "a-00000001.rows"])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (1, 100), (10**8, 10**8), (99_999_901, 10**8)])
def test_file_name_encodes_any_source_and_its_steps(tmp_path: Path, name: str, first: int, last: int) -> None:
    path = path_of(tmp_path, f"eval.{name}", "rows", first, last)
    path.parent.mkdir()
    path.touch()
    (found,) = record_files(tmp_path)
    assert (found.source, found.first, found.last, found.kind) == (f"eval.{name}", first, last, "rows")


def test_pipes_and_links_to_nothing_are_no_files_of_a_record(tmp_path: Path) -> None:
    pipe, link = (path_of(tmp_path, "train", "rows", step, step) for step in (1, 2))
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "nothing")
    assert list(record_files(tmp_path)) == []
