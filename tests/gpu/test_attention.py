"""Flash attention over packs on a GPU makes what plain attention makes of each sequence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlite.backends.models.attention import PackedLayout, packed_attention
from rlite.runtime.parallel.context_parallel import ContextShare

pytestmark = pytest.mark.gpu

LENGTHS = [130, 1, 77, 300, 4]
QUERY_HEADS, DIM, SCALE = 4, 64, 0.2


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Group of this process alone: its share is the whole pack, cut into two chunks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def inputs(key_heads: int) -> tuple[list[Tensor], Tensor]:
    """Query, key and value [1, heads, T, D] that lie as a model's do, and weights of the output [1, T, H, D]."""
    generator = torch.Generator("cuda").manual_seed(key_heads)

    def draw(heads: int) -> Tensor:
        shape = (1, sum(LENGTHS), heads, DIM)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    return [draw(heads).transpose(1, 2).requires_grad_() for heads in (QUERY_HEADS, key_heads, key_heads)], draw(4)


def expected(tensors: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Output and gradients in float32, sequence after sequence."""
    exact = [x.detach().float().requires_grad_() for x in tensors]
    query, *others = exact
    key, value = (x.repeat_interleave(QUERY_HEADS // x.shape[1], dim=1) for x in others)
    parts = zip(*(x.split(LENGTHS, dim=2) for x in (query, key, value)), strict=True)
    attended = [F.scaled_dot_product_attention(*part, is_causal=True, scale=SCALE) for part in parts]
    out = torch.cat(attended, dim=2).transpose(1, 2)
    return [out, *torch.autograd.grad((out * weights).sum(), exact)]


def assert_attends(tensors: list[Tensor], weights: Tensor, layout: PackedLayout) -> None:
    out, _ = packed_attention(None, *tensors, None, scaling=SCALE, packed_layout=layout)
    found = [out, *torch.autograd.grad((out * weights).sum(), tensors)]
    for actual, reference in zip(found, expected(tensors, weights), strict=True):
        assert actual.shape == reference.shape
        error = (actual.float() - reference).norm() / reference.norm()
        assert error < 0.01, "more than bfloat16 rounds away"


def cu_seqlens() -> Tensor:
    return torch.tensor([0, *LENGTHS], device="cuda").cumsum(0)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_each_sequence_of_a_pack_attends_as_if_it_were_alone(key_heads: int) -> None:
    assert_attends(*inputs(key_heads), PackedLayout(cu_seqlens(), max(LENGTHS)))


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_a_share_of_a_pack_sees_the_keys_of_the_whole_pack(key_heads: int, group: dist.ProcessGroup) -> None:
    layout = PackedLayout(cu_seqlens(), max(LENGTHS), ContextShare(cu_seqlens(), group))
    tensors, weights = inputs(key_heads)
    assert_attends(tensors, weights, layout)
    made = layout.segments
    assert_attends(tensors, weights, layout)
    assert layout.segments is made, "the index is made once for all layers"
