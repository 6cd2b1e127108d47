"""Token rows: what is cut, dropped and counted, and the batches that are made of the rest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlite.data.packs import check_batch, sequence_lengths
from rlite.data.tokens import TokenRows, Tokens, tokenise
from rlite.errors import ConfigError, DataError


def tokens(prompt: int, response: int) -> Tokens:
    length = prompt + response
    return np.arange(1, length + 1, dtype=np.int32), np.arange(length) >= prompt


def token_rows(shapes: Sequence[tuple[int, int]], max_length: int) -> TokenRows:
    return tokenise(len(shapes), lambda numbers: [[tokens(*shapes[n])] for n in numbers], max_length, "data.path=x")


SHAPES = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), min_size=1, max_size=20)


@given(SHAPES, st.integers(2, 16))
def test_every_row_is_kept_cut_or_dropped_and_counted(shapes: list[tuple[int, int]], max_length: int) -> None:
    kept = [n for n, (prompt, response) in enumerate(shapes) if min(prompt + response, max_length) > max(prompt, 1)]
    if not kept:
        with pytest.raises(DataError, match=f"data.path=x: nothing to train on: 0 of {len(shapes)} rows"):
            token_rows(shapes, max_length)
        return
    rows = token_rows(shapes, max_length)
    assert rows.source.tolist() == kept
    assert rows.lengths.tolist() == [min(sum(shapes[n]), max_length) for n in kept]
    assert rows.tally.num_truncated == sum(sum(shapes[n]) > max_length for n in kept)
    assert sum(rows.tally.dropped.values()) == len(shapes) - len(kept) == rows.tally.num_read - rows.tally.num_kept
    assert rows.tally.longest == max(map(sum, shapes))
    batch = rows.batch(range(len(rows)))
    check_batch(batch)
    assert sequence_lengths(batch) == rows.lengths.tolist()
    for row, number in zip(batch, kept, strict=True):
        length = row["attention_mask"].sum()
        ids, mask = tokens(*shapes[number])
        mask[0] = False  # nothing predicts it
        assert row["input_ids"][:length].tolist() == ids[:length].tolist()
        assert row["loss_mask"][:length].tolist() == mask[:length].tolist()
        assert not row["loss_mask"][length:].any()


def test_batches_in_order_hold_every_row_once() -> None:
    rows = token_rows([(1, n) for n in range(1, 6)], 8)
    assert [sequence_lengths(batch) for batch in rows.batches(2)] == [[2, 3], [4, 5], [6]]


def test_a_tally_says_what_was_cut_and_dropped_in_one_line() -> None:
    rows = token_rows([(1, 1), (2, 9), (8, 1)], 6)
    assert str(rows.tally) == (
        "2 of 3 rows; 1 cut to max_length=6 (the longest has 11); 1 dropped: nothing to learn within max_length=6"
    )


def test_a_row_that_no_device_holds_is_named_by_its_number_in_the_file() -> None:
    rows = token_rows([(9, 1), (1, 3), (1, 6)], 8)
    rows.check_capacity(7, "actor.max_length_per_device")
    with pytest.raises(ConfigError, match=r"row index 2 of data has 7 tokens and actor.max_length_per_device is 6"):
        rows.check_capacity(6, "actor.max_length_per_device")


def test_a_max_length_that_leaves_nothing_to_predict_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_length=1: expected at least 2"):
        token_rows([(1, 1)], 1)
