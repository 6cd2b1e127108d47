"""vLLM and SGLang are sent the tensors of their checkpoint: its names, shapes, and parts that are not trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlite.backends.models.stored import StoredCheckpoint, held_tensors
from rlite.backends.sglang.worker import make_buckets, stored_buckets
from rlite.nn.pretrained import load_config, meta_model
from tests.unit.backends.models.small import CONTAINERS, TEXTS, container, text_model, written


@pytest.mark.parametrize("kind", [*TEXTS, *CONTAINERS])
def test_what_is_sent_has_the_names_and_shapes_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    files = {
        name: tuple(t.shape)
        for name, t in written((text_model if kind in TEXTS else container)(kind), tmp_path).items()
    }
    served = meta_model(load_config(tmp_path))  # as the workers of both executors make it
    reader, held = StoredCheckpoint(served, tmp_path), held_tensors(served)
    zeros = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in held.items()}
    sent = {name: tuple(tensor.shape) for name, tensor in reader.conversion.stored(zeros.items())}
    assert not sent.keys() & set(reader.untrained)
    assert sent | {name: files[name] for name in reader.untrained} == files
    buckets = stored_buckets(make_buckets(held), reader.conversion)
    assert {name: tuple(s.tensor.shape) for bucket in buckets for name, s in bucket.shards().items()} == sent
