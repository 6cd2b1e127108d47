"""The writer keeps its order, its limit and its errors."""

from __future__ import annotations

import random
import re
import string
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rlite.services.record import writer as module
from rlite.services.record.files import ROWS, TOKENS, path_of, read_gaps
from rlite.services.record.writer import RecordWriter, Tables
from tests.recorded import recorded


def tables(step: int, size: int = 0) -> Tables:
    key = {"step": step, "group": 0, "sample": 0}
    text = "".join(random.Random(step).choices(string.printable, k=size))
    row = {**key, "item": "0", "status": "trained", "reason": "", "segments": [{"role": "model", "text": text}]}
    return {
        "rows": pa.Table.from_pylist([row], schema=ROWS),
        "tokens": pa.Table.from_pylist([{**key, "text": text}], schema=TOKENS),
    }


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RecordWriter]:
    made = RecordWriter(tmp_path, limit=2**30)
    yield made
    made.close()


def test_steps_are_written_in_order_and_are_there_after_a_flush(writer: RecordWriter, tmp_path: Path) -> None:
    for step in range(5):
        writer.write("train", step, lambda step=step: tables(step))  # type: ignore[misc]
    writer.flush()
    assert [row["step"] for row in recorded(tmp_path)] == list(range(5))
    assert not writer.has_removed


def test_no_more_than_a_few_steps_wait(writer: RecordWriter, tmp_path: Path) -> None:
    go, submitted = threading.Event(), threading.Event()

    def slow() -> Tables:
        assert go.wait(60)
        return tables(0)

    def submit() -> None:
        for _ in range(module.MAX_PENDING + 1):
            writer.write("train", 0, slow)
        submitted.set()

    thread = threading.Thread(target=submit)
    thread.start()
    assert not submitted.wait(0.2), "a further step waits for the first"
    go.set()
    thread.join(60)
    assert submitted.is_set()


def test_a_full_disk_ends_the_record_with_one_warning_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = path_of(tmp_path, "train", "rows", 3, 3)
    path.mkdir(parents=True)  # no file can take its place
    writer = RecordWriter(tmp_path, limit=2**30)
    for step in (1, 2, 3, 4, 5):
        writer.write("train", step, lambda step=step: tables(step))  # type: ignore[misc]
    writer.compact(5)
    writer.flush()
    writer.write("train", 6, lambda: tables(6))
    writer.close()
    [warning] = caplog.messages
    assert re.search(
        r"record: the record ends before step 3: .*train-00000003\.rows.*The run goes on.*Free space", warning
    )
    path.rmdir()
    assert [row["step"] for row in recorded(tmp_path)] == [1, 2], "no later step hides the gap"
    [gap] = read_gaps(tmp_path)
    assert (gap.first, gap.last) == (3, None)
    assert "could not be written" in gap.reason


def test_tables_that_cannot_be_made_end_the_record_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = RecordWriter(tmp_path, limit=2**30)
    writer.write("train", 1, lambda: {"rows": 1 / 0})  # type: ignore[dict-item]
    writer.write("train", 2, lambda: tables(2))
    writer.close()
    assert "ZeroDivisionError" in caplog.text
    assert [gap.first for gap in read_gaps(tmp_path)] == [1]
    assert recorded(tmp_path) == []


def test_a_gap_is_noted_as_soon_as_the_disk_takes_it(tmp_path: Path) -> None:
    (tmp_path / "record").touch()
    writer = RecordWriter(tmp_path, limit=2**30)
    writer.write("train", 1, lambda: tables(1))
    writer.flush()
    (tmp_path / "record").unlink()
    writer.write("train", 2, lambda: tables(2))
    writer._executor.submit(lambda: None).result()
    assert [gap.first for gap in read_gaps(tmp_path)] == [1]
    writer.close()
    assert len(read_gaps(tmp_path)) == 1


def test_a_merge_that_fails_ends_no_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = RecordWriter(tmp_path, limit=2**30)
    for step in (1, 2):
        writer.write("train", step, lambda step=step: tables(step))  # type: ignore[misc]
    path_of(tmp_path, "train", "rows", 1, 100).mkdir(parents=True)
    writer.compact(101)
    writer.write("train", 101, lambda: tables(101))
    writer.close()
    assert "the files of the record are not merged" in caplog.text
    assert [row["step"] for row in recorded(tmp_path)] == [1, 2, 101]


def test_a_step_that_is_never_written_ends_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RecordWriter(tmp_path, limit=2**30)
    go = threading.Event()
    monkeypatch.setattr(module, "TIMEOUT", 0.05)
    writer.write("train", 1, lambda: tables(1) if go.wait(60) else {})
    writer.write("train", 2, lambda: tables(2))
    writer.flush()
    monkeypatch.undo()
    go.set()
    writer.close()
    [gap] = read_gaps(tmp_path)
    assert (gap.first, gap.reason) == (1, "a step was not written in 0.05 s")


def test_the_oldest_texts_go_first_and_the_limit_holds(tmp_path: Path) -> None:
    limit = 800_000
    writer = RecordWriter(tmp_path, limit)
    for step in range(1, 31):
        writer.write("train", step, lambda step=step: tables(step, size=20_000))  # type: ignore[misc]
    writer.close()
    assert writer.has_removed
    rows = recorded(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 31)), "every row is still there"
    with_texts = [row["step"] for row in rows if row["segments"]]
    assert with_texts == list(range(with_texts[0], 31)), "the newest texts are kept"
    assert 1 < with_texts[0] < 30
    tokens = [row["step"] for row in recorded(tmp_path, kind="tokens")]
    assert tokens == list(range(tokens[0], 31))
    assert sum(path.stat().st_size for path in (tmp_path / "record").iterdir()) <= limit


def test_the_limit_holds_although_rows_alone_exceed_it(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, limit=60_000)
    for step in range(1, 31):
        writer.write("train", step, lambda step=step: tables(step))  # type: ignore[misc]
    writer.close()
    assert sum(path.stat().st_size for path in (tmp_path / "record").iterdir()) <= 60_000
    assert [row["step"] for row in recorded(tmp_path)][-1] == 30


def test_damaged_files_count_and_go_first(tmp_path: Path) -> None:
    first = RecordWriter(tmp_path, limit=2**30)
    first.write("train", 1, lambda: tables(1, size=20_000))
    first.close()
    damaged = path_of(tmp_path, "train", "tokens", 1, 100).with_suffix(".damaged")
    damaged.write_bytes(bytes(300_000))
    second = RecordWriter(tmp_path, limit=300_000)
    second.write("train", 2, lambda: tables(2, size=20_000))
    second.close()
    assert not damaged.exists()
    assert second.has_removed
    assert all(row["segments"] for row in recorded(tmp_path))


@pytest.mark.parametrize(("times", "is_merged"), [(1.5, False), (2.5, True)])
def test_files_are_merged_only_if_the_limit_has_room_for_both(tmp_path: Path, times: float, is_merged: bool) -> None:
    first = RecordWriter(tmp_path, limit=2**30)
    for step in (1, 2):
        first.write("train", step, lambda step=step: {"rows": tables(step, size=20_000)["rows"]})  # type: ignore[misc]
    first.close()
    folder = tmp_path / "record"
    second = RecordWriter(tmp_path, int(times * sum(path.stat().st_size for path in folder.iterdir())))
    second.compact(101)
    second.close()
    assert len(list(folder.iterdir())) == (1 if is_merged else 2)
    assert [row["step"] for row in recorded(tmp_path)] == [1, 2]
    assert not second.has_removed


def test_a_resumed_run_counts_what_is_there(tmp_path: Path) -> None:
    first = RecordWriter(tmp_path, limit=2**30)
    for step in range(1, 6):
        first.write("train", step, lambda step=step: tables(step, size=20_000))  # type: ignore[misc]
    first.close()
    second = RecordWriter(tmp_path, limit=100_000)
    second.write("train", 6, lambda: tables(6, size=20_000))
    second.close()
    assert second.has_removed
    assert recorded(tmp_path)[0]["segments"] is None


def test_a_step_that_is_recorded_again_without_tokens_has_none(writer: RecordWriter, tmp_path: Path) -> None:
    writer.write("train", 1, lambda: tables(1))
    writer.write("train", 1, lambda: {**tables(1), "tokens": TOKENS.empty_table()})
    writer.flush()
    assert len(recorded(tmp_path)) == 1
    assert recorded(tmp_path, kind="tokens") == []


def test_a_link_to_nothing_does_not_end_a_run(tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "train-00000001.rows.parquet").symlink_to(tmp_path / "nothing")
    writer = RecordWriter(tmp_path, limit=1)
    writer.write("train", 2, lambda: tables(2))
    writer.write("train", 1, lambda: tables(1))
    writer.close()
    assert writer.has_removed
