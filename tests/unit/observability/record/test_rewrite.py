"""Files of a record are merged, cut and stripped, and a reader sees each row once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlite.errors import StorageError
from rlite.services.record.files import ROWS, TOKENS, VERSION_KEY, Gap, path_of, read_gaps, record_files
from rlite.services.record.writer import compact, drop_later, strip, write_gaps, write_table
from tests.recorded import recorded


def write(folder: Path, step: int, source: str = "train", **values: Any) -> None:
    key = {"step": step, "group": step, "sample": 0}
    row = {**key, "item": "0", "status": "trained", "reason": "", **values}
    write_table(folder, source, step, "rows", pa.Table.from_pylist([row], schema=ROWS))
    write_table(folder, source, step, "tokens", pa.Table.from_pylist([{**key, "text": "a"}], schema=TOKENS))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "record").iterdir())


def steps(folder: Path, source: str = "train", kind: str = "rows") -> list[int]:
    return [row["step"] for row in recorded(folder, source, kind)]


def test_full_hundreds_before_the_oldest_checkpoint_become_one_file(tmp_path: Path) -> None:
    for step in range(95, 206):
        write(tmp_path, step)
    for step in (0, 50, 100, 150):
        write(tmp_path, step, "eval.test")
    compact(tmp_path, before=200)
    assert len(names(tmp_path)) == 2 * (1 + 105 + 1 + 2), "step 200 may still be evaluated"
    compact(tmp_path, before=201)
    assert [name for name in names(tmp_path) if name.endswith("rows.parquet")] == [
        *("eval.test-00000000.rows.parquet", "eval.test-00000001_00000100.rows.parquet"),
        *("eval.test-00000150.rows.parquet",),
        *("train-00000001_00000100.rows.parquet", "train-00000101_00000200.rows.parquet"),
        *(f"train-{step:08d}.rows.parquet" for step in range(201, 206)),
    ]
    for kind in ("rows", "tokens"):
        assert steps(tmp_path, kind=kind) == list(range(95, 206))
        assert steps(tmp_path, "eval.test", kind) == [0, 50, 100, 150]
    merged = next(file.path for file in record_files(tmp_path) if file.first < file.last)
    assert VERSION_KEY in pq.read_schema(merged).metadata


def test_files_of_an_older_rlite_are_merged_with_newer_ones(tmp_path: Path) -> None:
    for step in range(1, 101):
        write(tmp_path, step)
    older = path_of(tmp_path, "train", "rows", 1, 1)
    pq.write_table(pq.read_table(older).drop_columns(["failed_attempts", "redrawn"]), older)
    compact(tmp_path, before=101)
    assert steps(tmp_path) == list(range(1, 101))
    assert "train-00000001_00000100.rows.parquet" in names(tmp_path)


def test_a_merged_file_has_few_parts_of_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 101):
        write(tmp_path, step)
    compact(tmp_path, before=101)
    for kind in ("rows", "tokens"):
        merged = path_of(tmp_path, "train", kind, 1, 100)
        assert pq.ParquetFile(merged).num_row_groups == 1
    size = pq.read_table(path_of(tmp_path, "train", "tokens", 1, 100)).nbytes
    for step in range(101, 201):
        write(tmp_path, step)
    monkeypatch.setattr("rlite.services.record.writer.PART_BYTES", size // 4)
    compact(tmp_path, before=201)
    file = pq.ParquetFile(path_of(tmp_path, "train", "tokens", 101, 200))
    assert 4 <= file.num_row_groups <= 8
    assert max(file.read_row_group(part).nbytes for part in range(file.num_row_groups)) <= size // 4
    assert steps(tmp_path, kind="tokens") == list(range(1, 201))


def test_a_reader_sees_each_step_once_while_files_are_merged(tmp_path: Path) -> None:
    for step in range(1, 101):
        write(tmp_path, step)
    single = path_of(tmp_path, "train", "rows", 7, 7)
    content = single.read_bytes()
    compact(tmp_path, before=101)
    single.write_bytes(content)  # as if it had been killed before it deleted the merged files
    assert steps(tmp_path) == list(range(1, 101))
    drop_later(tmp_path, 100)
    assert not single.exists()


def test_an_evaluation_after_the_last_step_of_a_hundred_is_kept(tmp_path: Path) -> None:
    for step in (50, 75):
        write(tmp_path, step, "eval.test")
    compact(tmp_path, before=100)
    write(tmp_path, 100, "eval.test")
    for before in (100, 101):
        compact(tmp_path, before)
        assert steps(tmp_path, "eval.test") == [50, 75, 100]


def test_a_resumed_run_drops_later_steps_and_cuts_merged_files(tmp_path: Path) -> None:
    for step in range(1, 106):
        write(tmp_path, step)
    compact(tmp_path, before=101)
    (tmp_path / "record" / ".train-00000106.rows.parquet.1.partial").touch()
    drop_later(tmp_path, 60)
    assert names(tmp_path) == [f"train-00000001_00000060.{kind}.parquet" for kind in ("rows", "tokens")]
    for step in range(61, 121):
        write(tmp_path, step)
    compact(tmp_path, before=120)
    for kind in ("rows", "tokens"):
        assert steps(tmp_path, kind=kind) == list(range(1, 121))
    assert len(names(tmp_path)) == 2 * (1 + 20)


def test_a_resumed_run_ends_the_gaps_and_drops_later_ones(tmp_path: Path) -> None:
    write_gaps(tmp_path, [Gap(3, 5, "full"), Gap(8, None, "full"), Gap(30, None, "full")])
    drop_later(tmp_path, 20)
    assert read_gaps(tmp_path) == [Gap(3, 5, "full"), Gap(8, 20, "full")]
    drop_later(tmp_path, 4)
    assert read_gaps(tmp_path) == [Gap(3, 4, "full")]
    with (tmp_path / "record" / "gaps.jsonl").open("a") as file:
        file.write('{"first": 4}\n[1]\n{"first": 1e999, "last": null, "reason": ""}\n')
        file.write("[" * 100_000 + '\n{"fir')
    assert read_gaps(tmp_path) == [Gap(3, 4, "full")]


def test_a_new_run_drops_everything(tmp_path: Path) -> None:
    write(tmp_path, 0, "eval.test")
    write(tmp_path, 1)
    write_gaps(tmp_path, [Gap(3, None, "full")])
    drop_later(tmp_path, -1)
    assert names(tmp_path) == []


def test_a_folder_without_a_record_is_left_alone(tmp_path: Path) -> None:
    drop_later(tmp_path, 3)
    compact(tmp_path, 300)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named_and_disturbs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(1, 101):
        write(tmp_path, step)
    path_of(tmp_path, "train", "rows", 3, 3).write_bytes(b"cut off")
    compact(tmp_path, before=101)
    assert "train-00000003.rows.parquet" in caplog.text
    assert len([name for name in names(tmp_path) if "rows" in name]) == 100
    assert steps(tmp_path, kind="tokens") == list(range(1, 101))


def damage(path: Path) -> None:
    """Damage the first page of a file, which pyarrow finds when it reads the rows, and tells as OSError."""
    content = bytearray(path.read_bytes())
    content[4:40] = b"\xff" * 36
    path.write_bytes(content)
    with pytest.raises(OSError, match=r"."):
        pq.ParquetFile(path).read_row_group(0)


def test_damaged_pages_do_not_end_a_run_and_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(1, 101):
        write(tmp_path, step, segments=[{"role": "model", "text": "4"}])
    damaged = path_of(tmp_path, "train", "rows", 3, 3)
    damage(damaged)
    for _ in range(2):
        compact(tmp_path, before=101)
    assert not strip(next(file for file in record_files(tmp_path) if file.path == damaged))
    assert caplog.text.count("train-00000003.rows.parquet cannot be read") == 1
    assert damaged.exists()
    assert steps(tmp_path, kind="tokens") == list(range(1, 101))


def test_a_merged_file_with_damaged_pages_does_not_block_a_resume(tmp_path: Path) -> None:
    for step in range(1, 101):
        write(tmp_path, step)
    compact(tmp_path, before=101)
    damage(path_of(tmp_path, "train", "rows", 1, 100))
    drop_later(tmp_path, 60)
    assert "train-00000001_00000100.rows.damaged" in names(tmp_path)
    assert steps(tmp_path, kind="tokens") == list(range(1, 61))


def test_a_full_disk_is_still_an_error_of_writing(tmp_path: Path) -> None:
    for step in range(1, 101):
        write(tmp_path, step)
    target = path_of(tmp_path, "train", "rows", 1, 100)
    target.with_name(f".{target.name}.{os.getpid()}.partial").mkdir()
    with pytest.raises(StorageError, match="train-00000001_00000100"):
        compact(tmp_path, before=101)


def test_a_damaged_file_of_later_steps_is_set_aside(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path_of(tmp_path, "train", "rows", 1, 100).write_bytes(b"cut off")
    drop_later(tmp_path, 60)
    assert "train-00000001_00000100.rows.damaged" in names(tmp_path)
    write(tmp_path, 61)
    assert steps(tmp_path)[-1] == 61


def test_texts_are_removed_and_rows_stay(tmp_path: Path) -> None:
    write(tmp_path, 1, segments=[{"role": "model", "text": "4"}], data={"question": "2+2"}, reward=1.0)
    write(tmp_path, 2)
    write(tmp_path, 3, data={"question": "2+2"})
    has_changed = {file.first: strip(file) for file in list(record_files(tmp_path)) if file.kind == "rows"}
    assert has_changed == {1: True, 2: False, 3: True}
    rows = recorded(tmp_path)
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 1.0), (2, None), (3, None)]
    assert all(row["segments"] is None and row["data"] is None for row in rows)
    assert all(strip(file) for file in list(record_files(tmp_path)) if file.kind == "tokens")
    assert steps(tmp_path, kind="tokens") == []


def test_a_text_is_searched_only_up_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlite.services.record.writer.PART_BYTES", 1)  # a part of the file for each step
    for step in range(1, 101):
        write(tmp_path, step, segments=[{"role": "model", "text": "4"}] if step > 5 else None)
    compact(tmp_path, before=101)
    [merged] = [file for file in record_files(tmp_path) if file.kind == "rows"]
    read: list[int] = []

    class Counted(pq.ParquetFile):
        def read_row_group(self, i: int, *args: Any, columns: Any = None, **options: Any) -> pa.Table:
            if columns is not None:  # the copy without texts reads all columns
                read.append(i)
            return super().read_row_group(i, *args, columns=columns, **options)

    monkeypatch.setattr(pq, "ParquetFile", Counted)
    monkeypatch.setattr(pq, "read_table", None)
    assert strip(merged)
    assert read == [0, 1, 2, 3, 4, 5]
