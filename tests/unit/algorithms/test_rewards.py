from __future__ import annotations

import pytest
import torch

from rlite.algorithms import adaptive_kl_coef, kl_shaped_rewards, last_action_rewards
from rlite.errors import ConfigError


def test_a_score_stands_on_the_last_action_and_one_without_actions_is_lost() -> None:
    mask = torch.tensor([0, 1, 0, 1, 0, 0, 0, 1, 1])
    cu_seqlens = torch.tensor([0, 5, 7, 8])  # the ninth token is padding
    rewards = last_action_rewards(torch.tensor([2.0, 5.0, 3.0]), mask, cu_seqlens=cu_seqlens)
    assert rewards.tolist() == [0, 0, 0, 2, 0, 0, 0, 3, 0]
    assert last_action_rewards(torch.tensor([4.0, 5.0]), torch.tensor([[1, 0], [0, 0]])).tolist() == [[4, 0], [0, 0]]


def test_leaving_the_reference_costs_reward_on_actions_alone() -> None:
    rewards, mask = torch.tensor([0.0, 1.0, 9.0]), torch.tensor([1, 1, 0])
    shaped = kl_shaped_rewards(rewards, torch.tensor([-1.0, -1.0, 0.0]), torch.tensor([-3.0, -1.0, -9.0]), mask, 0.5)
    assert shaped.tolist() == [-1.0, 1.0, 0.0]


def test_the_coefficient_rises_above_the_target_and_falls_below_it_by_a_bounded_step() -> None:
    options = {"target": 2.0, "horizon": 100, "num_steps": 10}
    assert adaptive_kl_coef(1.0, 2.0, **options) == 1.0
    assert adaptive_kl_coef(1.0, 1e9, **options) == pytest.approx(1.02)
    assert adaptive_kl_coef(1.0, 0.0, **options) == pytest.approx(0.98)
    with pytest.raises(ConfigError, match="target=0"):
        adaptive_kl_coef(1.0, 1.0, target=0, horizon=100, num_steps=1)
