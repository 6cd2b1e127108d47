"""Norms, rotary embeddings and gates in C: the numbers of PyTorch, for any batch and any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rlite.backends.embedded.model import Pointwise
from rlite.backends.serving.native import compiled

MAX_LEN = 50
ROWS = 37
Made = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def compiler() -> None:
    """Fail, and do not skip, where the library cannot be compiled: CI has a compiler."""
    assert compiled() is not None


def both(dim: int) -> tuple[Pointwise, Pointwise]:
    """In C and by PyTorch, with the angles that transformers would give."""
    half = torch.outer(torch.arange(MAX_LEN), 1e4 ** -torch.arange(0, 1, 2 / dim)[: dim // 2])
    cos, sin = half.cos(), half.sin()
    angles = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
    return Pointwise(angles, is_native=True), Pointwise(angles, is_native=False)


def norm_of(width: int) -> SimpleNamespace:
    return SimpleNamespace(weight=torch.rand(width) + 0.5, variance_epsilon=1e-5)


def check(work: Callable[[Pointwise], Made], dim: int) -> None:
    ours, theirs = (work(pointwise) for pointwise in both(dim))
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=3e-6, atol=3e-7)


@pytest.mark.parametrize("width", [256, 100, 7])
@pytest.mark.parametrize("is_added", [True, False])
def test_a_norm_of_a_sum(width: int, is_added: bool) -> None:
    torch.manual_seed(1)
    x, added, norm = 10 * torch.randn(ROWS, width), torch.randn(ROWS, width), norm_of(width)

    def work(pointwise: Pointwise) -> Made:
        stream = x.clone()
        return pointwise.add_norm(norm, stream, added if is_added else None), stream

    check(work, 8)


@pytest.mark.parametrize("dim", [64, 24, 6])
@pytest.mark.parametrize("is_normalised", [True, False])
def test_rotated_heads(dim: int, is_normalised: bool) -> None:
    torch.manual_seed(2)
    x, positions, norm = torch.randn(ROWS, 3, dim), torch.randint(MAX_LEN, (ROWS,)), norm_of(dim)
    check(lambda pointwise: (pointwise.norm_rotate(norm if is_normalised else None, x.clone(), positions),), dim)


@pytest.mark.parametrize("width", [512, 5])
def test_gates(width: int) -> None:
    torch.manual_seed(3)
    gate, up, silu = 20 * torch.randn(ROWS, width), torch.randn(ROWS, width), torch.nn.SiLU()
    gate[0, :4] = torch.tensor([-1e4, 1e4, 0.0, -0.0])
    check(lambda pointwise: (pointwise.gate(silu, gate.clone(), up),), 8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_show_in_their_row_alone(bad: float) -> None:
    pointwise, _ = both(8)
    x = torch.randn(ROWS, 4, 8)
    x[5, 2, 3] = bad
    positions = torch.arange(ROWS)
    made = (
        pointwise.add_norm(norm_of(32), x.flatten(1).clone(), None),
        pointwise.norm_rotate(norm_of(8), x.clone(), positions).flatten(1),
        pointwise.gate(None, x.flatten(1).clone(), torch.zeros(ROWS, 32)),
    )
    for found in made:
        assert (~found.isfinite().all(1)).nonzero().tolist() == [[5]]


def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads() -> None:
    pointwise, _ = both(8)
    x, up, positions, norm = torch.randn(ROWS, 4, 8), torch.randn(ROWS, 32), torch.arange(ROWS), norm_of(32)

    def work(rows: int) -> list[Tensor]:
        flat = x[:rows].flatten(1)
        normed = pointwise.add_norm(norm, flat.clone(), up[:rows])
        rotated = pointwise.norm_rotate(None, x[:rows].clone(), positions[:rows]).flatten(1)
        return [normed, rotated, pointwise.gate(None, flat.clone(), up[:rows])]

    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        threaded = work(ROWS)
    finally:
        torch.set_num_threads(num_threads)
    for whole, shared, few in zip(work(ROWS), threaded, work(6), strict=True):
        assert torch.equal(whole, shared)
        assert torch.equal(whole[:6], few)
