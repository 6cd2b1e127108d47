from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlite.algorithms import aggregate, aggregation_weight, sequence_log_ratio, sequence_means, sequence_sums, to_tokens
from rlite.errors import ConfigError

HOWS = ("token", "sequence", "constant")


def pack(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    x = torch.randn(total, generator=generator, dtype=torch.float64)
    mask = torch.rand(total, generator=generator) < 0.7
    return x, mask, torch.tensor([0, *lengths]).cumsum(0)


@pytest.mark.parametrize("how", HOWS)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=8), split=st.integers(1, 8), seed=st.integers(0, 99))
def test_any_split_into_microbatches_gives_the_loss_and_gradient_of_the_whole(
    how: str, lengths: list[int], split: int, seed: int
) -> None:
    x, mask, cu_seqlens = pack(lengths, seed)
    x.requires_grad_()
    whole = aggregate(x, mask, how, cu_seqlens=cu_seqlens, length=16)
    counts = {
        "num_tokens": aggregation_weight(mask, "token"),
        "num_sequences": aggregation_weight(mask, "sequence", cu_seqlens),
    }
    total_weight = aggregation_weight(mask, how, cu_seqlens).clamp(min=1)
    by_counts, by_weights = torch.zeros(()), torch.zeros(())
    for first in range(0, len(lengths), split):
        bounds = cu_seqlens[first : first + split + 1]
        part = slice(int(bounds[0]), int(bounds[-1]))
        piece = {"cu_seqlens": bounds - bounds[0], "length": 16}
        by_counts = by_counts + aggregate(x[part], mask[part], how, **piece, **counts)
        weight = aggregation_weight(mask[part], how, piece["cu_seqlens"])
        by_weights = by_weights + aggregate(x[part], mask[part], how, **piece) * weight / total_weight
    expected = torch.autograd.grad(whole, x, retain_graph=True)[0]
    for sum_of_parts in (by_counts, by_weights):
        torch.testing.assert_close(sum_of_parts, whole)
        torch.testing.assert_close(torch.autograd.grad(sum_of_parts, x, retain_graph=True)[0], expected)


@pytest.mark.parametrize("how", HOWS)
def test_packed_rows_give_what_padded_rows_give(how: str) -> None:
    x, mask, cu_seqlens = pack([3, 5, 2])
    padded, padded_mask = torch.full((3, 5), float("nan"), dtype=torch.float64), torch.zeros(3, 5, dtype=torch.bool)
    for row, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
        padded[row, : end - start], padded_mask[row, : end - start] = x[start:end], mask[start:end]
    packed = aggregate(x, mask, how, cu_seqlens=cu_seqlens, length=4)
    torch.testing.assert_close(aggregate(padded, padded_mask, how, length=4), packed)
    torch.testing.assert_close(sequence_sums(padded, padded_mask), sequence_sums(x, mask, cu_seqlens))


def test_padding_after_the_last_sequence_and_empty_sequences_count_for_nothing() -> None:
    x, mask, cu_seqlens = torch.tensor([1.0, 3.0, 5.0, 100.0]), torch.ones(4), torch.tensor([0, 2, 2, 3])
    assert sequence_sums(x, mask, cu_seqlens).tolist() == [4.0, 0.0, 5.0]
    assert sequence_means(x, mask, cu_seqlens).tolist() == [2.0, 0.0, 5.0]
    assert aggregate(x, mask, "sequence", cu_seqlens=cu_seqlens).item() == 3.5
    assert to_tokens(torch.tensor([1.0, 2.0, 3.0]), mask, cu_seqlens).tolist() == [1.0, 1.0, 3.0, 0.0]


@pytest.mark.parametrize("how", HOWS)
def test_a_masked_nan_reaches_neither_the_loss_nor_the_gradient(how: str) -> None:
    x = torch.tensor([[1.0, float("nan")], [2.0, float("inf")]], requires_grad=True)
    loss = aggregate(x, torch.tensor([[1, 0], [1, 0]]), how, length=2)
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()
    assert (x.grad[:, 1] == 0).all()


@pytest.mark.parametrize("how", HOWS)
def test_an_empty_batch_has_loss_zero(how: str) -> None:
    assert aggregate(torch.ones(2, 3), torch.zeros(2, 3), how, length=4).item() == 0.0


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'tokens'.*token, sequence, constant"):
        aggregate(torch.ones(2, 3), torch.ones(2, 3), "tokens")
    with pytest.raises(ConfigError, match="length=None"):
        aggregate(torch.ones(2, 3), torch.ones(2, 3), "constant")
    with pytest.raises(ConfigError, match=r"padded \[B, L\].*\[6\]"):
        aggregate(torch.ones(6), torch.ones(6), "sequence")


def test_the_sequence_ratio_spreads_its_gradient_over_the_sequence() -> None:
    log_ratio = torch.tensor([0.2, 0.4, 7.0, 1.0], requires_grad=True)
    spread = sequence_log_ratio(log_ratio, torch.tensor([1, 1, 0, 1]), torch.tensor([0, 3, 4]))
    torch.testing.assert_close(spread, torch.tensor([0.3, 0.3, 0.0, 1.0]))
    spread[0].backward()
    assert log_ratio.grad.tolist() == [0.5, 0.5, 0.0, 0.0]
