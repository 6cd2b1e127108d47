"""The writer keeps its order, its limit and its errors."""

from __future__ import annotations

import random
import string
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rlite.errors import StorageError
from rlite.observability.record import writer as module
from rlite.observability.record.schema import ROWS, TOKENS
from rlite.observability.record.writer import RecordWriter, Tables
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


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "record").touch()
    writer = RecordWriter(tmp_path, limit=2**30)
    writer.write("train", 1, lambda: tables(1))
    with pytest.raises(StorageError, match=r"train-00000001\.rows\.parquet: could not be written"):
        writer.flush()
    writer.close()


def test_a_step_that_is_never_written_is_an_error(writer: RecordWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(module, "TIMEOUT", 0.05)
    writer.write("train", 1, lambda: tables(1) if go.wait(60) else {})
    with pytest.raises(StorageError, match=r"record: a step was not written in 0\.05 s"):
        writer.flush()
    go.set()


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
