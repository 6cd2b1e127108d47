from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlite.algorithms import (
    gdpo_advantages,
    gpg_advantages,
    normalize_rewards,
    opo_advantages,
    optimal_token_advantages,
    pass_at_k_advantages,
    sum_pi_squared,
)
from rlite.errors import ConfigError

GROUPS = torch.tensor([5, 5, 5, 2, 2, 2])


def test_equal_rewards_have_no_advantage_whatever_the_estimator() -> None:
    rewards, lengths = torch.full((6,), 0.7), torch.tensor([3, 1, 4, 1, 5, 9])
    assert (gpg_advantages(rewards, GROUPS) == 0).all()
    assert (opo_advantages(rewards, GROUPS, lengths=lengths) == 0).all()
    assert (pass_at_k_advantages(rewards, GROUPS, norm_std=True) == 0).all()
    assert (gdpo_advantages(torch.stack([rewards, 2 * rewards]), GROUPS) == 0).all()


def test_gpg_makes_up_for_the_responses_that_failed() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(gpg_advantages(rewards, GROUPS)[:3], torch.tensor([4.0, -2.0, -2.0]))
    assert (gpg_advantages(torch.zeros(6), GROUPS) == 0).all()


def test_opo_weighs_its_baseline_by_length() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 3.0])
    advantages = opo_advantages(rewards, GROUPS, lengths=torch.tensor([2, 1, 1, 0, 0, 0]))
    torch.testing.assert_close(advantages, torch.tensor([0.5, -0.5, -0.5, 0.0, 0.0, 0.0]))


def test_only_the_one_best_of_a_group_counts_for_pass_at_k() -> None:
    rewards = torch.tensor([0.25, 1.0, 0.5, 1.0, 1.0, 0.0, 7.0])
    groups = torch.tensor([5, 5, 5, 2, 2, 2, 9])
    assert pass_at_k_advantages(rewards, groups).tolist() == [0, 0.5, 0, 0, 0, 0, 0]


def test_a_kind_of_reward_with_a_large_spread_does_not_drown_the_others_in_gdpo() -> None:
    kinds = torch.tensor([[1.0, 0.0, 0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 2.0, 5.0, 3.0, 4.0]], dtype=torch.float64)
    scaled = kinds * torch.tensor([[1000.0], [1.0]])
    torch.testing.assert_close(gdpo_advantages(kinds, GROUPS, eps=0.0), gdpo_advantages(scaled, GROUPS, eps=0.0))
    with pytest.raises(ConfigError, match="1 weights for 2 kinds"):
        gdpo_advantages(kinds, GROUPS, weights=[1.0])


def test_the_std_may_be_about_its_own_mean() -> None:
    rewards = torch.tensor([0.0, 2.0, 10.0, 12.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1])
    options = {"mean": "group", "std": "batch", "eps": 0.0}
    own = normalize_rewards(rewards, groups, **options, std_about="own_mean")
    torch.testing.assert_close(own, torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=torch.float64) / rewards.std())
    assert normalize_rewards(rewards, groups, **options).abs().max() > own.abs().max()


@given(st.integers(0, 99))
def test_the_optimal_token_baseline_has_the_least_variance_of_all_baselines(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, logprobs, energy = torch.rand(3, 5, 1, generator=generator, dtype=torch.float64)
    logprobs, sums = logprobs.log(), energy + 1
    advantages = optimal_token_advantages(rewards, logprobs, sums, torch.ones(5, 1), torch.zeros(5, dtype=torch.long))
    squared_norm = 1 - 2 * logprobs.exp() + sums

    def variance(baseline: float) -> float:
        return float((squared_norm * (rewards - baseline).square()).sum())

    baseline = float((rewards - advantages)[0])
    assert variance(baseline) < min(variance(baseline - 0.01), variance(baseline + 0.01))


def test_who_acts_alone_has_no_token_baseline() -> None:
    rewards = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
    rest = (torch.zeros_like(rewards).log(), torch.zeros_like(rewards), mask, torch.tensor([0, 0, 1]))
    alone = optimal_token_advantages(rewards, *rest)
    torch.testing.assert_close(alone[:, 1], torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64))
    assert alone[2, 0] == 3
    tail = optimal_token_advantages(rewards, *rest, zero_tail=False)
    assert tail[0, 1].abs() < 1e-6


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_the_sum_of_squared_probabilities_is_that_of_the_softmax(chunk_size: int | None) -> None:
    logits = 5 * torch.randn(3, 5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = (logits / 0.7).softmax(-1).square().sum(-1)
    torch.testing.assert_close(sum_pi_squared(logits, 0.7, chunk_size=chunk_size), expected)
