from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rlite.batch import INTEGER, KEYS, PER_TOKEN
from rlite.data.packs import check_has, with_keys
from rlite.errors import DataError


def test_a_batch_with_further_keys_is_a_new_one_that_shares_its_tensors() -> None:
    batch = TensorDict({"input_ids": torch.ones(2, 3, dtype=torch.int64), "values": torch.zeros(2, 3)}, batch_size=[2])
    more = with_keys(batch, values=(values := torch.ones(2, 3)), returns=(returns := torch.ones(2, 3)))
    assert more["input_ids"] is batch["input_ids"]
    assert more["values"] is values
    assert more["returns"] is returns
    assert sorted(batch.keys()) == ["input_ids", "values"]
    assert batch["values"].sum() == 0
    assert more.batch_size == batch.batch_size


def test_a_missing_key_is_named_with_its_writer_and_meaning() -> None:
    batch = TensorDict({"input_ids": torch.ones(2, 3), "score": torch.ones(2)}, batch_size=[2])
    check_has(batch, "input_ids")
    with pytest.raises(
        DataError, match=r"no 'rewards', which the workflow must return: Reward of .*it has input_ids, score"
    ):
        check_has(batch, "input_ids", "rewards")


def test_keys_of_trajectories_are_told_from_those_of_later_phases() -> None:
    assert {"logprobs", "versions"} <= PER_TOKEN
    assert PER_TOKEN.isdisjoint({"advantages", "values", "rewards", "position_ids"})
    assert {"input_ids", "versions", "kept_counts"} == INTEGER
    assert KEYS["versions"].padding == -1
