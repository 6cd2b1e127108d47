"""Prefill on CUDA is one call of torch's variable-length attention, whose parameters differ between versions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlite.backends.embedded.attention import PrefillPlan
from rlite.backends.embedded.cache import CacheShape, PagedCache
from rlite.backends.embedded.scheduler import Chunk
from rlite.backends.models import attention
from rlite.backends.models.attention import Weighting
from rlite.backends.models.layout import AttentionLayer

CPU = torch.device("cpu")
HEADS = (4, 2, 2)


class VarlenOfTorch211:
    """On the CPU, with the parameters of torch 2.11: keys have as many heads as queries."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(
        self,
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
        assert query.shape[1] == key.shape[1]
        assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
        assert len(query) == cu_seq_q[-1]
        assert len(key) == len(value) == cu_seq_k[-1]
        self.num_calls += 1
        parts = []
        ends_of_queries, ends_of_keys = cu_seq_q[1:-1].tolist(), cu_seq_k[1:-1].tolist()
        rows = (
            x.tensor_split(ends) for x, ends in ((query, ends_of_queries), (key, ends_of_keys), (value, ends_of_keys))
        )
        for q, k, v in zip(*rows, strict=True):
            back = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
            sees = (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale).transpose(0, 1))
        return torch.cat(parts)


@pytest.fixture
def varlen_of_torch_2_11(monkeypatch: pytest.MonkeyPatch) -> VarlenOfTorch211:
    function = VarlenOfTorch211()
    monkeypatch.setattr(attention, "varlen_attn", function)
    monkeypatch.setattr(attention, "TAKES_GROUPED_KEYS", False)
    return function


def rows(num: int) -> list[Tensor]:
    """Queries, keys and values of this many tokens."""
    generator = torch.Generator().manual_seed(num)
    return [torch.randn(num, heads, 8, generator=generator, dtype=torch.float64) for heads in HEADS]


def filled_cache(dtype: torch.dtype = torch.float64) -> PagedCache:
    """A cache of eight pages whose positions all hold something."""
    cache = PagedCache(CacheShape({0: AttentionLayer(4, 2, 8, 8)}, 8), dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    for storage in (cache.keys[0], cache.values[0]):
        storage.copy_(torch.randn(storage.shape, generator=generator))
    return cache


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("starts", [(0, 0, 0), (60, 0, 7), (64, 64, 64)], ids=["whole", "mixed", "siblings"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["plain", "blocked"])
def test_one_call_attends_to_the_chunks_of_all_prompts_whether_or_not_they_continue_earlier_ones(
    window: int | None, starts: tuple[int, ...], dtype: torch.dtype, varlen_of_torch_2_11: VarlenOfTorch211
) -> None:
    lengths = (3, 9, 1)
    chunks = [
        Chunk(row=index, start=start, stop=start + num, tokens=[7] * num, pages=(7 - 2 * index, 2 + 2 * index))
        for index, (start, num) in enumerate(zip(starts, lengths, strict=True))
    ]
    query, key, value = (x.to(dtype) for x in rows(sum(lengths)))
    on_cuda = PrefillPlan(filled_cache(dtype), chunks, is_flash=True, is_invariant=False)
    found = on_cuda.attend(0, query, key, value, Weighting(0.3, window))
    assert varlen_of_torch_2_11.num_calls == 1
    by_chunk = PrefillPlan(filled_cache(dtype), chunks, is_flash=False, is_invariant=False)
    expected = by_chunk.attend(0, query, key, value, Weighting(0.3, window))
    torch.testing.assert_close(found, expected)


def test_the_call_of_variable_length_attention_is_in_one_place() -> None:
    root = Path(attention.__file__).parents[1]
    assert [path for path in root.rglob("*.py") if "varlen_attn(" in path.read_text()] == [Path(attention.__file__)]
