from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlite.algorithms import (
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    normalize_rewards,
    opo_advantages,
    pass_at_k_advantages,
    rloo_advantages,
)
from rlite.errors import ConfigError

GROUPS = torch.tensor([5, 5, 5, 2, 2, 2])


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


def test_equal_rewards_have_no_advantage_with_any_estimator() -> None:
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
