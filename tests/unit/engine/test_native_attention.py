"""Attention of decode steps in C: the numbers of PyTorch, for any batch and any number of threads."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch
from torch import Tensor

from rlite.backends.embedded.attention import DecodePlan, NativeDecodePlan
from rlite.backends.embedded.cache import CacheShape, PagedCache
from rlite.backends.embedded.pages import num_pages
from rlite.backends.models.attention import Softmax, Weighting
from rlite.backends.models.layout import AttentionLayer
from rlite.backends.serving.native import compiled
from tests import forked_python

CPU = torch.device("cpu")
SHAPES = [(4, 2, 64, 320), (8, 2, 24, 200), (6, 6, 80, 130), (3, 1, 16, 64), (2, 2, 7, 100), (4, 4, 128, 260)]
"""heads, key heads, head_dim, max_len"""


@pytest.fixture(autouse=True)
def compiler() -> None:
    """Fail, and do not skip, where the library cannot be compiled: CI has a compiler."""
    assert compiled() is not None


def filled_cache(rows: int, shape: tuple[int, int, int, int], width: int | None = None) -> PagedCache:
    heads, kv_heads, dim, max_len = shape
    layers = dict.fromkeys(range(2), AttentionLayer(heads, kv_heads, dim, width or dim))
    cache = PagedCache(CacheShape(layers, rows * num_pages(max_len) + 1), torch.float32, CPU)
    for part in (*cache.keys.values(), *cache.values.values()):
        part.copy_(torch.randn_like(part))
    return cache


def table_of(rows: int, shape: tuple[int, int, int, int]) -> Tensor:
    """The pages of each row, in any order."""
    width, generator = num_pages(shape[3]), torch.Generator().manual_seed(rows)
    return (torch.randperm(rows * width, generator=generator) + 1).view(rows, width)


def copy_into(cache: PagedCache, source: PagedCache) -> None:
    for layer in source.keys:
        cache.keys[layer].copy_(source.keys[layer])
        cache.values[layer].copy_(source.values[layer])


def new_tokens(rows: int, shape: tuple[int, int, int, int], width: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads, dim, _ = shape
    query, key = 3 * torch.randn(rows, heads, dim), torch.randn(rows, kv_heads, dim)
    return query, key, torch.randn(rows, kv_heads, width or dim)


KINDS = [(None, False, None), (24, False, None), (80, True, None), (None, True, 2.5), (None, False, 2.5)]
"""width of values, if it is not that of keys; whether there are sinks; the cap of scores"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 33, 64, 1000])
def test_it_computes_what_pytorch_computes(
    shape: tuple[int, int, int, int], window: int | None, kind: tuple[int | None, bool, float | None]
) -> None:
    torch.manual_seed(1)
    width, has_sinks, softcap = kind
    softmax = Softmax(softcap, 3 * torch.randn(shape[0]) if has_sinks else None)
    rows, dim = 9, shape[2]
    expected, cache = filled_cache(rows, shape, width), filled_cache(rows, shape, width)
    copy_into(cache, expected)
    lengths = [1, 2, shape[3] - 1, *torch.randint(1, shape[3] - 1, (rows - 3,)).tolist()]
    positions = torch.tensor(lengths) - 1 + torch.arange(2)[:, None]
    table = table_of(rows, shape)
    plans = DecodePlan(expected, table, positions, lengths), NativeDecodePlan(cache, table, positions)
    for step in range(2):
        query, key, value = new_tokens(rows, shape, width)
        for plan in plans if step else ():
            plan.go_to(step)
        theirs, ours = (plan.attend(1, query, key, value, Weighting(dim**-0.5, window, softmax)) for plan in plans)
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
        assert torch.equal(cache.keys[1], expected.keys[1])
        assert torch.equal(cache.values[1], expected.values[1])


def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads() -> None:
    torch.manual_seed(2)
    shape, rows = SHAPES[0], 40
    cache, (query, key, value) = filled_cache(rows, shape), new_tokens(rows, SHAPES[0])
    positions = torch.randint(0, 300, (1, rows))
    num_threads, table = torch.get_num_threads(), table_of(rows, shape)
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(NativeDecodePlan(cache, table, positions).attend(0, query, key, value, Weighting(0.1)))
    finally:
        torch.set_num_threads(num_threads)
    fewer = NativeDecodePlan(cache, table[:7], positions[:, :7]).attend(
        0, query[:7], key[:7], value[:7], Weighting(0.1)
    )
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[0][:7], fewer)


@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("nan")])
def test_values_that_are_not_finite_show_in_their_row_alone(what: str, bad: float) -> None:
    torch.manual_seed(3)
    shape, rows = SHAPES[0], 4
    cache, tokens = (
        filled_cache(rows, shape),
        dict(zip(("query", "key", "value"), new_tokens(rows, shape), strict=True)),
    )
    tokens[what][2] = bad
    plan = NativeDecodePlan(cache, table_of(rows, shape), torch.tensor([[5, 70, 90, 11]]))
    found = plan.attend(0, **tokens, weighting=Weighting(0.1))
    is_finite = found.isfinite().flatten(1).all(1)
    assert is_finite.tolist() == [True, True, False, True]


def test_large_scores_do_not_overflow() -> None:
    torch.manual_seed(4)
    shape, rows = SHAPES[0], 3
    caches = [filled_cache(rows, shape) for _ in range(2)]
    copy_into(caches[1], caches[0])
    lengths, (query, key, value) = [300, 17, 130], new_tokens(rows, shape)
    positions = torch.tensor([lengths]) - 1
    table = table_of(rows, shape)
    theirs = DecodePlan(caches[0], table, positions, lengths).attend(0, query, key, value, Weighting(100.0))
    ours = NativeDecodePlan(caches[1], table, positions).attend(0, query, key, value, Weighting(100.0))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_without_a_compiler_pytorch_computes_it(tmp_path: object) -> None:
    program = "from rlite.backends.serving.native import compiled; print(compiled())"
    environment = {**os.environ, "CC": "/nonexistent/cc", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [forked_python.python(), "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == "None"
