"""Prefill on CUDA is one call of torch's variable-length attention, whose parameters differ between versions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlite.engine.embedded.attention import PrefillPlan
from rlite.engine.embedded.cache import CacheShape, SlotCache
from rlite.engine.embedded.scheduler import Chunk
from rlite.nn import attention

LENGTHS = (3, 9, 1)


def varlen_of_torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """On the CPU, with the parameters of torch 2.11: keys have as many heads as queries."""
    assert query.shape[1] == key.shape[1]
    assert (max_q, max_k) == (max(LENGTHS), max(LENGTHS))
    parts = []
    for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
        back = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        sees = (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
        parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [None, 4])
def test_a_prefill_on_cuda_needs_no_parameter_that_torch_2_11_lacks(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(attention, "varlen_attn", varlen_of_torch_2_11)
    monkeypatch.setattr(attention, "TAKES_GROUPED_KEYS", False)
    chunks = [Chunk(slot=i, start=0, stop=n, tokens=[7] * n) for i, n in enumerate(LENGTHS)]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(sum(LENGTHS), heads, 8, generator=generator) for heads in (4, 2, 2))

    def plan() -> PrefillPlan:
        return PrefillPlan(SlotCache(CacheShape(1, len(LENGTHS), 4, 2, 16, 8), torch.float32, cpu), chunks, cpu)

    on_cuda = plan()
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    on_cuda._bounds = attention.Bounds(ends, ends, max(LENGTHS), max(LENGTHS))
    found = on_cuda.attend(0, query, key, value, 0.3, window)
    torch.testing.assert_close(found, plan().attend(0, query, key, value, 0.3, window))


def test_the_call_of_variable_length_attention_is_in_one_place() -> None:
    root = Path(attention.__file__).parents[1]
    assert [path for path in root.rglob("*.py") if "varlen_attn(" in path.read_text()] == [Path(attention.__file__)]
