"""Staged parameters leave for a server under the names of its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlite.backends.models.conversion import Conversion, Group
from rlite.backends.models.expressions import Leaf, Transposed
from rlite.backends.models.stored import StoredCheckpoint, held_tensors
from rlite.backends.serving.staging import Staging
from rlite.backends.sglang import worker
from rlite.backends.sglang.worker import Bucket, make_buckets, serialized, stored_buckets
from tests.unit.backends.models.small import held, text_model, written


def staged(model: Any) -> list[Bucket]:
    buckets = make_buckets(held_tensors(model))
    for bucket in buckets:
        for name, shard in bucket.shards().items():
            shard.tensor.copy_(held(model)[name])
    return buckets


def contents(buckets: list[Bucket]) -> dict[str, Tensor]:
    return {name: shard.tensor for bucket in buckets for name, shard in bucket.shards().items()}


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_neox"])
def test_buckets_hold_the_tensors_that_the_checkpoint_has(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "BUCKET_BYTES", 2**16)
    model = text_model(kind)
    expected = written(model, tmp_path)
    sent = list(stored_buckets(staged(model), StoredCheckpoint(model, tmp_path).conversion))
    found = contents(sent)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    largest = max(tensor.nbytes for tensor in expected.values())
    assert max(len(bucket.flat) for bucket in sent) <= 2 * 2**16 + largest


def test_buckets_of_a_checkpoint_with_the_model_s_own_names_are_sent_as_they_are(tmp_path: Path) -> None:
    model = text_model("qwen3")
    written(model, tmp_path)
    buckets = staged(model)
    sent = list(stored_buckets(buckets, StoredCheckpoint(model, tmp_path).conversion))
    assert [one.flat.data_ptr() for one in sent] == [other.flat.data_ptr() for other in buckets]


def test_buckets_are_converted_if_tensors_have_other_forms_under_the_same_names() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    buckets = make_buckets({"up": (matrix.dtype, (2, 3))})
    buckets[0].shards()["up"].tensor.copy_(matrix)
    held = Leaf("up", (2, 3))
    conversion = Conversion(
        [Group({"up": Transposed(Leaf("up", (3, 2)), 0, 1)}, {"up": Transposed(held, 0, 1)})], [], []
    )
    assert torch.equal(contents(list(stored_buckets(buckets, conversion)))["up"], matrix.T)


def test_buckets_of_one_memory_hold_what_others_hold_and_travel_one_by_one() -> None:
    parameters = {f"matrix.{number}": (torch.float32, (64, 64)) for number in range(4)}
    staging = Staging(torch.device("cpu"), parameters)
    addresses = set()
    for _ in range(3):
        buckets = make_buckets(parameters, 64 * 64 * 4, staging.begin(is_near=True).empty)
        addresses.add(tuple(bucket.flat.data_ptr() for bucket in buckets))
        assert len(buckets) == 4
        assert len(serialized(buckets[0].flat, buckets[0])) < 2 * len(buckets[0].flat)
        staging.end()
    assert len(addresses) == 1, "later syncs take no further memory"
