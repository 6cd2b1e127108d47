"""The files of a record."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rlite.observability.record.files import record_files, write_table
from rlite.observability.record.schema import ROWS, VERSION, VERSION_KEY

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
    (tmp_path / "record" / "train-00000001-00000002.rows.parquet").touch()
    found = [(file.source, file.first, file.last, file.kind) for file in record_files(tmp_path)]
    assert found == [("eval.held-out", 0, 0, "rows"), ("train", 1, 2, "rows"), ("train", 3, 3, "tokens")]
