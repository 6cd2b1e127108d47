from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlite.algorithms import gather_logprobs_entropy
from rlite.backends.models.head_logprobs import logprobs_of
from rlite.errors import ConfigError
from rlite.nn import linear_logprobs
from rlite.runtime.parallel.context_parallel import ContextShare
from tests.kept_ids import kept_sets, pairs_of, written_out

VOCAB, WIDTH = 13, 5


def inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, labels."""
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, WIDTH), (VOCAB, WIDTH), (VOCAB,)]
    floats = [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    ]
    return *floats, torch.randint(VOCAB, (num_tokens,), generator=generator)


@pytest.mark.parametrize(("block_size", "num_kept"), [(1, 0), (5, 30), (5, 10**6), (13, 0), (100, 0), (None, None)])
def test_gradients_are_right_for_any_number_of_blocks_and_kept_blocks(
    block_size: int | None, num_kept: int | None
) -> None:
    hidden, weight, bias, labels = inputs(4)

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        options = {"bias": bias, "block_size": block_size, "num_kept": num_kept}
        return linear_logprobs(hidden, weight, labels, 0.7, **options)

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))
    assert torch.autograd.gradcheck(lambda *x: both(*x)[0], (hidden, weight, bias))
    assert torch.autograd.gradcheck(lambda *x: both(*x)[1], (hidden, weight, bias))


@pytest.mark.parametrize("num_tokens", [0, 1, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_those_of_materialised_logits(num_tokens: int, dtype: torch.dtype) -> None:
    hidden, weight, bias, labels = inputs(num_tokens, dtype)
    for with_bias in (False, True):
        leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
        logits = nn.functional.linear(*leaves)
        expected = gather_logprobs_entropy(logits, labels, 1.3)
        ours = linear_logprobs(hidden, weight, labels, 1.3, bias=bias if with_bias else None, block_size=4, num_kept=0)
        for x, y in zip(ours, expected, strict=True):
            torch.testing.assert_close(x, y)
        gradients = [torch.autograd.grad((a.square() + a * b).sum(), leaves) for a, b in (ours, expected)]
        for x, y in zip(*gradients, strict=True):
            torch.testing.assert_close(x, y)


def test_a_bfloat16_weight_gets_gradients_as_exact_as_its_dtype() -> None:
    hidden, weight, _, labels = inputs(2000, torch.bfloat16)
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    linear_logprobs(hidden, weight, labels, block_size=4, num_kept=0).logprobs.sum().backward()
    linear_logprobs(exact_hidden, exact_weight, labels).logprobs.sum().backward()
    for ours, exact in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - exact).norm() < 0.01 * exact.norm()


def test_rows_that_a_bias_forbids_have_no_share_and_no_gradient() -> None:
    hidden, weight, bias, labels = inputs(6)
    with torch.no_grad():
        bias[3:7] = -torch.inf  # a block of its own, and a part of the next
    labels[:] = 1
    ours = linear_logprobs(hidden, weight, labels, bias=bias, block_size=3)
    allowed = [v for v in range(VOCAB) if v not in range(3, 7)]
    expected = linear_logprobs(hidden, weight[allowed], labels, bias=bias[allowed])
    torch.testing.assert_close(ours, expected)
    (ours.logprobs + ours.entropy).sum().backward()
    assert weight.grad.isfinite().all()
    assert not weight.grad[3:7].any()


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_elements = max(
            self.num_elements, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)), 0
        )
        return result


@pytest.mark.parametrize("num_kept", [0, 500])
def test_no_more_than_a_block_of_logits_is_ever_made_and_no_more_is_kept_than_is_allowed(num_kept: int) -> None:
    hidden, weight, _, labels = inputs(64)
    saved: list[Tensor] = []
    with Largest() as largest, saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        (
            linear_logprobs(hidden, weight, labels, block_size=2, num_kept=num_kept).logprobs * hidden[:, 0]
        ).sum().backward()
    assert largest.num_elements == hidden.numel() < 64 * VOCAB
    beside = {x.data_ptr(): x.numel() for x in saved}
    assert sum(beside.values()) <= hidden.numel() + weight.numel() + 5 * len(labels) + num_kept


def test_a_label_outside_the_vocabulary_is_impossible_and_shapes_that_do_not_fit_are_refused() -> None:
    hidden, weight, _, labels = inputs(3)
    labels[1] = VOCAB
    assert linear_logprobs(hidden, weight, labels).logprobs.isinf().tolist() == [False, True, False]
    with pytest.raises(ConfigError, match=r"\[3, 5\].*\[2\]"):
        linear_logprobs(hidden, weight, labels[1:])
    with pytest.raises(ConfigError, match="temperature=0"):
        linear_logprobs(hidden, weight, labels, 0)


def test_a_head_answers_with_log_probabilities_where_they_are_wanted_and_is_itself_again() -> None:
    hidden, _, _, labels = inputs(8)
    head = nn.Linear(WIDTH, VOCAB, dtype=torch.float64)
    positions = torch.arange(8) % 3 == 1
    expected = torch.stack(gather_logprobs_entropy(head(hidden), labels, 0.5), -1) * positions[:, None]
    with logprobs_of(head, labels, 0.5, positions) as answers:
        output = head(hidden[None])
    torch.testing.assert_close(output[0], expected)
    alone = ContextShare(torch.tensor([0, 8]), None)
    assert answers[0].is_what_became(output[0], alone)
    assert not answers[0].is_what_became(output * 2, alone)
    gradients = [torch.autograd.grad(x.sum(), [hidden, *head.parameters()]) for x in (output, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    output.mul_(2)
    assert not answers[0].is_what_became(output, alone)
    assert head(hidden).shape == (8, VOCAB)
    assert "forward" not in vars(head)


@pytest.mark.parametrize(("block_size", "num_kept"), [(1, 0), (5, 30), (5, 10**6), (13, 0), (None, None)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_logprobs_over_kept_ids_and_their_gradients_are_those_of_a_softmax_over_the_kept_ids(
    block_size: int | None, num_kept: int | None, temperature: float, with_bias: bool
) -> None:
    hidden, weight, bias, labels = inputs(10)
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    sets = kept_sets(labels.tolist(), VOCAB)
    options = {"bias": bias if with_bias else None, "block_size": block_size, "num_kept": num_kept}
    ours = linear_logprobs(hidden, weight, labels, temperature, **options, replay=pairs_of(sets))
    logits = nn.functional.linear(*leaves)
    full, entropy = gather_logprobs_entropy(logits, labels, temperature)
    expected = written_out(logits, labels, sets, temperature), entropy, full
    found = ours.logprobs, ours.entropy, ours.full_logprobs
    torch.testing.assert_close(found, expected)
    for chosen in ((0,), (1,), (2,), (0, 1), (0, 1, 2)):
        gradients = [
            torch.autograd.grad(sum((x[i] ** (i + 1)).sum() for i in chosen), leaves, retain_graph=True)
            for x in (found, expected)
        ]
        torch.testing.assert_close(*gradients)


def test_bfloat16_logprobs_over_kept_ids_are_those_of_their_own_logits() -> None:
    hidden, weight, _, labels = inputs(40, torch.bfloat16)
    sets = kept_sets(labels.tolist(), VOCAB)
    ours = linear_logprobs(hidden, weight, labels, 0.7, block_size=4, replay=pairs_of(sets))
    logits = nn.functional.linear(hidden, weight).double()
    torch.testing.assert_close(ours.logprobs.double(), written_out(logits, labels, sets, 0.7), atol=1e-5, rtol=0)
    ours.logprobs.sum().backward()
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    written_out(exact_hidden @ exact_weight.T, labels, sets, 0.7).sum().backward()
    for found, exact in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert (found.double() - exact).norm() < 0.02 * exact.norm()


def test_a_token_whose_only_kept_id_is_its_own_has_probability_one_and_teaches_nothing() -> None:
    hidden, weight, _, labels = inputs(3)
    ours = linear_logprobs(hidden, weight, labels, replay=pairs_of([[int(label)] for label in labels]))
    torch.testing.assert_close(ours.logprobs, torch.zeros(3, dtype=torch.float64))
    assert not torch.autograd.grad(ours.logprobs.sum(), weight)[0].abs().max() > 1e-12


def test_a_head_restricts_the_positions_that_are_wanted() -> None:
    hidden, _, _, labels = inputs(8)
    head = nn.Linear(WIDTH, VOCAB, dtype=torch.float64)
    positions = torch.arange(8) % 3 != 1
    sets = kept_sets(labels.tolist(), VOCAB)
    with logprobs_of(head, labels, 0.5, positions, pairs_of(sets)) as answers:
        output = head(hidden[None])[0]
    full, entropy = gather_logprobs_entropy(head(hidden), labels, 0.5)
    expected = torch.stack([written_out(head(hidden), labels, sets, 0.5), entropy, full], -1) * positions[:, None]
    torch.testing.assert_close(output, expected)
    assert answers[0].is_what_became(output, ContextShare(torch.tensor([0, 8]), None))
