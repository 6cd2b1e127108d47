from __future__ import annotations

import math

import pytest
import torch

from rlite.algorithms import (
    behaviour_weights,
    importance_weights,
    off_policy_metrics,
    rejection_mask,
    weight_metrics,
)

SAMPLER = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
TRAINED = torch.tensor([-1.0, -1.1, -3.0, -1.0, -1.0])
MASK = torch.tensor([1, 1, 1, 1, 0])
CU_SEQLENS = torch.tensor([0, 3, 5])


def test_a_token_out_of_bounds_is_rejected_and_in_a_sequences_scope_the_sequence() -> None:
    policies = (TRAINED, SAMPLER, MASK)
    by_token = rejection_mask(*policies, upper=0.5, scope="token", cu_seqlens=CU_SEQLENS)
    assert by_token.tolist() == [True, True, False, True, False]
    by_sequence = rejection_mask(*policies, upper=0.3, cu_seqlens=CU_SEQLENS)
    assert by_sequence.tolist() == [False, False, False, True, False]


def test_nothing_is_rejected_of_the_policy_itself_and_it_measures_zero() -> None:
    assert torch.equal(rejection_mask(SAMPLER, SAMPLER, MASK, upper=0.0, cu_seqlens=CU_SEQLENS), MASK.bool())
    metrics = off_policy_metrics(SAMPLER, SAMPLER, MASK, cu_seqlens=CU_SEQLENS)
    assert metrics["kl"] == metrics["k3_kl"] == metrics["chi2_sequence"] == metrics["log_perplexity_gap_max"] == 0
    assert metrics["perplexity"] == metrics["sampler_perplexity"] == math.e


def test_an_infinite_ratio_is_rejected_and_does_not_hide_in_nan() -> None:
    trained = torch.tensor([-1.0, -torch.inf, -1.0, -1.0, -1.0])
    kept = rejection_mask(trained, SAMPLER, MASK, upper=10.0, estimator="k1", scope="token", cu_seqlens=CU_SEQLENS)
    assert kept.tolist() == [True, False, True, True, False]


def test_the_effective_fraction_is_one_of_equal_weights_and_one_in_n_where_one_weight_is_all() -> None:
    assert weight_metrics(torch.full((5,), 0.5), MASK)["effective_fraction"] == 1
    assert weight_metrics(torch.tensor([3.0, 0.0, 0.0, 0.0, 9.0]), MASK)["effective_fraction"] == 0.25
    empty = weight_metrics(importance_weights(TRAINED, SAMPLER, MASK, cu_seqlens=CU_SEQLENS), torch.zeros(5))
    assert all(value == 0 for value in empty.values())


def test_weights_carry_no_gradient_and_ignore_masked_tokens() -> None:
    train, sampler = torch.zeros(2, 3, requires_grad=True), torch.full((2, 3), -1.0)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    truncated = importance_weights(train, sampler, mask, upper=2.0)
    assert truncated.tolist() == [[2.0, 2.0, 0.0], [2.0, 0.0, 0.0]]
    assert not truncated.requires_grad
    bounded = behaviour_weights(train, sampler, mask, upper=2.0, action="mask")
    assert bounded.weights.sum() == 0
    assert bounded.kept.sum() == 0
    assert bounded.changed.sum() == 3


@pytest.mark.parametrize("over", ["mean", "sum", "max"])
def test_sequence_bounds_look_at_the_whole_packed_sequence(over: str) -> None:
    proximal = torch.tensor([0.3, 0.3, 0.0, -0.1, 9.0, 0.1])
    mask = torch.tensor([1, 1, 1, 1, 0, 1])
    cu_seqlens = torch.tensor([0, 3, 6])
    reached = {"mean": (0.2, 0.0), "sum": (0.6, 0.0), "max": (0.3, 0.1)}[over]
    for sequence, statistic in enumerate(reached):
        for slack in (1e-3, -1e-3):
            kept = behaviour_weights(
                proximal,
                torch.zeros(6),
                mask,
                upper=math.exp(statistic + slack),
                scope="sequence",
                action="mask",
                over=over,
                cu_seqlens=cu_seqlens,
            ).kept
            assert kept[3 * sequence].item() == (slack > 0)
