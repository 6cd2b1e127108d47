from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlite.algorithms import (
    discounted_returns,
    gae,
    last_action_rewards,
    masked_whiten,
    optimal_token_advantages,
)


def gae_by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    advantages, next_advantage, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        next_advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        next_value = value
        advantages.append(next_advantage)
    return advantages[::-1]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.integers(0, 99))
def test_gae_on_a_pack_is_the_recursion_over_each_sequences_action_tokens(
    lengths: list[int], gamma: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    mask = torch.rand(sum(lengths), generator=generator) < 0.6
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    advantages, returns = gae(rewards, values, mask, gamma, 0.9, cu_seqlens=cu_seqlens)
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        kept = mask[start:end]
        expected = gae_by_hand(rewards[start:end][kept].tolist(), values[start:end][kept].tolist(), gamma, 0.9)
        torch.testing.assert_close(advantages[start:end][kept], torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(returns, torch.where(mask, advantages + values, 0.0))
    assert (advantages[~mask] == 0).all()


def test_undiscounted_returns_are_the_reward_still_to_come() -> None:
    rewards = torch.tensor([[0.0, 1.0, 9.0, 2.0], [5.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]])
    assert discounted_returns(rewards, mask).tolist() == [[3.0, 3.0, 0.0, 2.0], [5.0, 0.0, 0.0, 0.0]]


def test_whitening_a_constant_gives_zeros() -> None:
    white = masked_whiten(torch.full((3, 4), 0.7), torch.ones(3, 4))
    assert white.abs().max() < 1e-6


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


def test_single_actor_has_no_token_baseline() -> None:
    rewards = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
    rest = (torch.zeros_like(rewards).log(), torch.zeros_like(rewards), mask, torch.tensor([0, 0, 1]))
    alone = optimal_token_advantages(rewards, *rest)
    torch.testing.assert_close(alone[:, 1], torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64))
    assert alone[2, 0] == 3
    tail = optimal_token_advantages(rewards, *rest, zero_tail=False)
    assert tail[0, 1].abs() < 1e-6


def test_a_score_stands_on_the_last_action_and_one_without_actions_is_lost() -> None:
    mask = torch.tensor([0, 1, 0, 1, 0, 0, 0, 1, 1])
    cu_seqlens = torch.tensor([0, 5, 7, 8])  # the ninth token is padding
    rewards = last_action_rewards(torch.tensor([2.0, 5.0, 3.0]), mask, cu_seqlens=cu_seqlens)
    assert rewards.tolist() == [0, 0, 0, 2, 0, 0, 0, 3, 0]
    assert last_action_rewards(torch.tensor([4.0, 5.0]), torch.tensor([[1, 0], [0, 0]])).tolist() == [[4, 0], [0, 0]]
