"""Shuffled batches, and going on exactly where a loader was."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlite.data.prompts import ShuffledOrder
from rlite.data.tokens import BatchLoader, TokenRows, tokenise
from rlite.errors import CheckpointError


def numbered_rows(count: int) -> TokenRows:
    """Row n says n."""
    return tokenise(
        count,
        lambda numbers: [[(np.array([n, n], dtype=np.int32), np.array([False, True]))] for n in numbers],
        8,
        "data.path=x",
    )


def dealt(loader: BatchLoader) -> list[list[int]]:
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


@given(st.integers(1, 20), st.integers(1, 7), st.integers(1, 4), st.integers(0, 99))
def test_epoch_yields_every_row_once_in_batches_of_the_requested_size(
    count: int, batch_size: int, n_epochs: int, seed: int
) -> None:
    loader = BatchLoader(numbered_rows(count), batch_size, seed, n_epochs)
    batches = dealt(loader)
    assert len(batches) == loader.num_batches == n_epochs * len(loader)
    for epoch in range(n_epochs):
        of_epoch = batches[epoch * len(loader) : (epoch + 1) * len(loader)]
        assert sorted(number for batch in of_epoch for number in batch) == list(range(count))
        assert {len(batch) for batch in of_epoch[:-1]} <= {batch_size}
    assert dealt(loader) == []
    assert loader.num_left == 0


@given(st.integers(1, 20), st.integers(1, 7), st.data())
def test_restored_loader_yields_the_remaining_batches(count: int, batch_size: int, data: st.DataObject) -> None:
    rows = numbered_rows(count)
    whole = dealt(BatchLoader(rows, batch_size, seed=1, n_epochs=3))
    loader = BatchLoader(rows, batch_size, seed=1, n_epochs=3)
    stop = data.draw(st.integers(0, loader.num_batches - 1))
    for _ in zip(range(stop), loader, strict=False):
        pass
    state = json.loads(json.dumps(loader.state_dict()))
    restored = BatchLoader(rows, batch_size, seed=2, n_epochs=3)
    restored.load_state_dict(state)
    assert dealt(restored) == whole[stop:]
    other = BatchLoader(rows, data.draw(st.integers(1, 7)), seed=1, n_epochs=3)
    other.load_state_dict(state)
    assert other.num_left == len(dealt(other))
    assert other.num_left == 0


def test_the_order_depends_on_seed_and_epoch() -> None:
    order, other = ShuffledOrder(50, seed=0), ShuffledOrder(50, seed=1)
    first, second = order.take(50), order.take(50)
    assert first != second
    assert first != other.take(50)
    assert (order.epoch, order.left_in_epoch) == (2, 50)


def test_a_state_of_other_data_is_refused() -> None:
    loader = BatchLoader(numbered_rows(5), 2)
    with pytest.raises(CheckpointError, match="made with 4 items of data; now there are 5"):
        loader.load_state_dict(BatchLoader(numbered_rows(4), 2).state_dict())
