from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlite.algorithms import discounted_returns, gae, group_advantages, masked_whiten, rloo_advantages
from rlite.errors import ConfigError


@pytest.mark.parametrize("reward", [0.7, 0.1, 1e-3, 1e6 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_rewards_have_no_advantage_not_even_rounding(reward: float, dtype: torch.dtype) -> None:
    rewards, groups = torch.full((11,), reward, dtype=dtype), torch.tensor([4] * 8 + [1] * 3)
    for norm_std in (False, True):
        assert (group_advantages(rewards, groups, norm_std=norm_std) == 0).all()
    assert (rloo_advantages(rewards, groups) == 0).all()


@given(st.permutations(range(9)), st.booleans())
def test_groups_may_come_in_any_order_and_any_size(order: list[int], norm_std: bool) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5, 2.0, 2.5, 3.0, 3.5, -1.0])
    groups = torch.tensor([7, 7, 7, -2, -2, 30, 30, 30, 30])
    straight = group_advantages(rewards, groups, norm_std=norm_std)
    shuffled = group_advantages(rewards[order], groups[order], norm_std=norm_std)
    torch.testing.assert_close(shuffled, straight[order])


def test_a_group_of_one_has_no_advantage_unless_its_raw_reward_is_asked_for() -> None:
    rewards, groups = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1])
    assert group_advantages(rewards, groups).tolist() == [-1.0, 1.0, 0.0]
    assert group_advantages(rewards, groups, singleton="raw").tolist() == [-1.0, 1.0, 5.0]
    assert rloo_advantages(rewards, groups).tolist() == [-2.0, 2.0, 0.0]


def test_whole_number_rewards_are_accepted_and_misfit_shapes_are_not() -> None:
    assert group_advantages(torch.tensor([1, 0]), torch.tensor([0, 0])).tolist() == [0.5, -0.5]
    with pytest.raises(ConfigError, match=r"\[3\], \[2\]"):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.long))


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
