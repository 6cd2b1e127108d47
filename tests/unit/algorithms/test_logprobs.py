from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlite.algorithms import (
    entropy,
    gather_logprobs,
    gather_logprobs_entropy,
    next_token,
    previous_token,
    sum_pi_squared,
)
from rlite.errors import ConfigError


def logits_and_labels(*shape: int, vocab: int = 13, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(*shape, vocab, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(vocab, shape, generator=generator)


@pytest.mark.parametrize("chunk_size", [1, 4, None])
def test_gradients_are_right_for_any_chunk_size(chunk_size: int | None) -> None:
    logits, labels = logits_and_labels(2, 5)
    logits.requires_grad_()

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gather_logprobs_entropy(x, labels, 0.7, chunk_size=chunk_size)

    assert torch.autograd.gradcheck(both, (logits,))
    assert torch.autograd.gradcheck(lambda x: gather_logprobs(x, labels, 0.7, chunk_size=chunk_size), (logits,))


def test_a_slice_of_padded_logits_gives_what_its_copy_gives() -> None:
    logits, labels = logits_and_labels(3, 6)
    logits.requires_grad_()
    sliced = gather_logprobs(logits[:, :-1], labels[:, 1:], chunk_size=4)
    expected = logits.log_softmax(-1)[:, :-1].gather(-1, labels[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(sliced, expected)
    ours, theirs = (torch.autograd.grad(x.square().sum(), logits)[0] for x in (sliced, expected))
    torch.testing.assert_close(ours, theirs)


def test_bfloat16_logits_are_worked_on_in_float32() -> None:
    logits, labels = logits_and_labels(64, vocab=4096, dtype=torch.bfloat16)
    logits.requires_grad_()
    logprobs, entropies = gather_logprobs_entropy(logits, labels, chunk_size=10)
    reference = logits.detach().double().log_softmax(-1)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), reference.gather(-1, labels[:, None]).squeeze(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropies.double(), -(reference.exp() * reference).sum(-1), atol=1e-5, rtol=0)
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_nothing_as_large_as_the_logits_is_kept_beside_them() -> None:
    logits, labels = logits_and_labels(32, vocab=100, dtype=torch.bfloat16)
    logits.requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        gather_logprobs_entropy(logits, labels)
    assert sum(x.numel() for x in saved if x.data_ptr() != logits.data_ptr()) <= 3 * len(labels)


def test_forbidden_tokens_have_no_share_in_entropy_and_no_gradient() -> None:
    logits, labels = logits_and_labels(4)
    logits[:, 5] = float("-inf")
    labels[:] = 0
    logits.requires_grad_()
    logprobs, entropies = gather_logprobs_entropy(logits, labels)
    allowed = [v for v in range(13) if v != 5]
    torch.testing.assert_close(entropies, entropy(logits[:, allowed]))
    (logprobs + entropies).sum().backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[:, 5] == 0).all()


def test_shapes_and_temperatures_that_cannot_be_meant_are_refused() -> None:
    logits, labels = logits_and_labels(2, 5)
    with pytest.raises(ConfigError, match=r"\[2, 5, 13\].*\[2, 5\].*\[2, 4\]"):
        gather_logprobs(logits, labels[:, 1:])
    with pytest.raises(ConfigError, match="temperature=0"):
        gather_logprobs(logits, labels, temperature=0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_shifts_stay_inside_each_packed_sequence(lengths: list[int]) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    rows = [list(range(10 * i + 1, 10 * i + 1 + n)) for i, n in enumerate(lengths)]
    packed = torch.tensor([token for row in rows for token in row], dtype=torch.long)
    following = [token for row in rows for token in [*row[1:], -7][: len(row)]]
    preceding = [token for row in rows for token in [-7, *row[:-1]][: len(row)]]
    assert next_token(packed, cu_seqlens, fill=-7).tolist() == following
    assert previous_token(packed, cu_seqlens, fill=-7).tolist() == preceding


def test_padded_rows_shift_as_packed_ones() -> None:
    rows = torch.arange(1, 13).view(3, 4)
    cu_seqlens = torch.tensor([0, 4, 8, 12])
    assert next_token(rows).flatten().tolist() == next_token(rows.flatten(), cu_seqlens).tolist()
    assert previous_token(rows).flatten().tolist() == previous_token(rows.flatten(), cu_seqlens).tolist()


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_the_sum_of_squared_probabilities_is_that_of_the_softmax(chunk_size: int | None) -> None:
    logits = 5 * torch.randn(3, 5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = (logits / 0.7).softmax(-1).square().sum(-1)
    torch.testing.assert_close(sum_pi_squared(logits, 0.7, chunk_size=chunk_size), expected)
