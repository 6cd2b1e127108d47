"""Batches that are rebuilt from a record of anyone."""

from __future__ import annotations

from typing import Any

import pytest

from rlite.errors import DataError
from rlite.services.record.batches import rebuilt


def row(length: int) -> dict[str, Any]:
    columns = {"ids": [1] * length, "mask": [True] * length, "versions": [0] * length, "logprobs": [-1.0] * length}
    return {**columns, "advantages": None, "trainer_logprobs": None, "entropy": None, "others": []}


def test_rows_are_padded_to_the_longest() -> None:
    batch = rebuilt([row(2), row(4)])
    assert batch.given["input_ids"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.made["advantages"].isnan().tolist() == [[True, True, False, False], [True] * 4]


def test_padding_that_does_not_fit_into_memory_is_refused_before_it_is_made() -> None:
    with pytest.raises(DataError, match=r"20001 rows of up to 1,000,000 tokens take .* GB when they are padded"):
        rebuilt([row(10**6), *[row(1)] * 20_000])
