"""The order of streamed items: each once per epoch, resumed exactly, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlite.data.readers.streaming import ShuffledStream, StreamedTable
from rlite.data.readers.tables import Row
from rlite.data.rows import rows_digest
from rlite.data.source import Source
from rlite.errors import CheckpointError, DataError, StreamedDataError


@dataclass
class Numbers:
    """Rows whose number is their item; -1 is dropped."""

    rows: list[Row]

    def items(self) -> list[int | None]:
        return [None if row["n"] < 0 else row["n"] for row in self.rows]

    def digest(self) -> str:
        return rows_digest(self.rows)


def numbers(rows: list[Row]) -> Numbers:
    for index, row in enumerate(rows):
        if not isinstance(row.get("n"), int):
            raise DataError(f"data, row index {index}: no number; row index 0 has one")
    return Numbers(rows)


def write(folder: Path, *files: Sequence[Any]) -> Path:
    for index, rows in enumerate(files):
        text = "".join(f"{json.dumps({'n': row})}\n{' ' * (index % 2)}\n" for row in rows)  # with blank lines
        (folder / f"part-{index}.jsonl").write_text(text)
    return folder


def stream(folder: Path, buffer_size: int, seed: int = 0, window: int = 3) -> ShuffledStream[int]:
    return ShuffledStream(StreamedTable(Source(str(folder)), numbers, buffer_size, window), seed)


def epochs(items: ShuffledStream[int], num_rows: int, num_epochs: int, count: int = 4) -> list[list[int]]:
    """Items of each epoch, taken a few at a time."""
    dealt: list[list[int]] = []
    for _ in range(num_epochs):
        dealt.append([])
        while len(dealt[-1]) < num_rows:
            dealt[-1] += items.take(count)
    return dealt


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any),
    st.integers(1, 40),
    st.integers(1, 7),
    st.integers(1, 6),
    st.integers(0, 99),
)
def test_every_row_occurs_once_in_an_epoch_in_bounded_memory(
    sizes: list[int], buffer_size: int, count: int, window: int, seed: int
) -> None:
    with TemporaryDirectory() as folder:
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        files = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        items = stream(write(Path(folder), *files), buffer_size, seed, window)
        for _ in range(3):
            dealt: list[int] = []
            while len(dealt) < sum(sizes):
                dealt += items.take(count)
                assert items.num_held < buffer_size + window
            assert sorted(dealt) == list(range(sum(sizes)))


@given(st.integers(1, 20), st.integers(1, 25), st.integers(1, 5), st.integers(0, 30))
def test_restored_stream_yields_the_same_rows_as_an_uninterrupted_one(
    num_rows: int, buffer_size: int, count: int, stop: int
) -> None:
    with TemporaryDirectory() as folder:
        path = write(Path(folder), range(num_rows), range(100, 100 + num_rows // 2), [-1, 200, -1, 201])
        whole = stream(path, buffer_size)
        dealt = [whole.take(count) for _ in range(stop + 30)]
        stopped = stream(path, buffer_size)
        for _ in range(stop):
            stopped.take(count)
        restored = stream(path, buffer_size, seed=5)
        restored.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert [restored.take(count) for _ in range(30)] == dealt[stop:]


def test_the_order_depends_on_seed_and_epoch_and_a_buffer_of_one_keeps_the_files_order(tmp_path: Path) -> None:
    write(tmp_path, range(20), range(20, 30))
    first, second = epochs(stream(tmp_path, 8), 30, 2)
    assert first != second
    assert epochs(stream(tmp_path, 8), 30, 2) == [first, second]
    assert epochs(stream(tmp_path, 8, seed=1), 30, 1) != [first]
    assert epochs(stream(tmp_path, 1), 30, 2) == [list(range(30))] * 2


def test_a_batch_ends_with_its_epoch(tmp_path: Path) -> None:
    items = stream(write(tmp_path, range(5)), 2)
    assert [len(items.take(2)) for _ in range(6)] == [2, 2, 1, 2, 2, 1]


def test_a_bad_row_is_named_and_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    write(tmp_path, [*range(9), "x", 10])
    items = stream(tmp_path, 2)
    dealt = items.take(4) + items.take(4)
    state = items.state_dict()
    with pytest.raises(
        StreamedDataError, match=r"^data\.path=.*/part-0\.jsonl, line 19: no number; data.*, line 1 has one$"
    ):
        items.take(4)
    assert items.state_dict() == state
    write(tmp_path, range(11))
    restored = stream(tmp_path, 2)
    restored.load_state_dict(state)
    assert sorted(dealt + restored.take(4)) == list(range(11))


def test_rows_of_the_first_window_are_checked_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"part-0\.jsonl, line 3: no number"):
        stream(write(tmp_path, [0, "x"]), 2)
    with pytest.raises(DataError, match="no rows; expected at least one"):
        stream(write(tmp_path, []), 2)


def test_a_state_of_other_data_is_refused(tmp_path: Path) -> None:
    write(tmp_path, range(20), range(20, 30))
    items = stream(tmp_path, 4)
    items.take(19)
    state = items.state_dict()
    with pytest.raises(CheckpointError, match="made without streaming"):
        stream(tmp_path, 4).load_state_dict({"num_items": 30})
    write(tmp_path, range(20), range(20, 30), [31])
    with pytest.raises(CheckpointError, match=r"made with 2 files of data; now there are 3"):
        stream(tmp_path, 4).load_state_dict(state)
    (tmp_path / "part-2.jsonl").unlink()
    write(tmp_path, [*range(3), 99, *range(4, 20)], [*range(20, 23), 99, *range(24, 30)])
    with pytest.raises(CheckpointError, match=r"part-\d\.jsonl was changed in the part that the run has read"):
        stream(tmp_path, 4).load_state_dict(state)
    write(tmp_path, [7, *range(1, 20)], range(20, 30))
    with pytest.raises(CheckpointError, match="another content of the data"):
        stream(tmp_path, 4).load_state_dict(state)
