"""Decode batches of any size: transformers' logits, and matrix products of few shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlite.backends.embedded.attention import NativeDecodePlan
from rlite.backends.embedded.cache import CacheShape, EmbeddedOptions, PagedCache
from rlite.backends.embedded.model import ROWS, ShardedModel
from rlite.backends.models.linear import MIN_ROWS
from tests.tiny import build_model_dir

CPU = torch.device("cpu")
FEW = range(1, 12)
MANY = range(MIN_ROWS - 1, MIN_ROWS + ROWS + 1)


@torch.inference_mode()
def test_logits_are_those_of_transformers_and_many_rows_are_filled_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_model_dir(tmp_path / "m", "qwen3", hidden=64)
    model = ShardedModel(str(path), EmbeddedOptions(dtype="float32"), CPU, None)
    model.load()
    model.specialise(max_len=8)
    head, seen = model.model.lm_head, []
    forward = head.forward
    monkeypatch.setattr(head, "forward", lambda x: seen.append(len(x)) or forward(x))
    tokens = torch.arange(3, 3 + MANY[-1])
    expected = AutoModelForCausalLM.from_pretrained(path).eval()(tokens[:, None]).logits[:, 0]
    for rows in {*FEW, *MANY}:
        cache = PagedCache(CacheShape(model.layers, rows + 1), torch.float32, CPU)
        positions = torch.zeros(rows, dtype=torch.int64)
        table = torch.arange(1, rows + 1)[:, None]
        logits = model.logits(tokens[:rows], positions, NativeDecodePlan(cache, table, positions[None]))
        torch.testing.assert_close(logits, expected[:rows], rtol=1e-5, atol=1e-5)
    assert {rows for rows in seen if rows >= MIN_ROWS} == {rows + -rows % ROWS for rows in MANY[1:]}
    assert {rows for rows in seen if rows < MIN_ROWS} == {*FEW, MIN_ROWS - 1}
