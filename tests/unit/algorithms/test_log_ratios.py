from __future__ import annotations

import pytest
import torch

from rlite.algorithms import adaptive_kl_coef, kl_penalty, kl_shaped_rewards
from rlite.errors import ConfigError


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


def test_a_wild_log_ratio_keeps_k3_finite() -> None:
    logprobs = torch.tensor([0.0, -500.0], requires_grad=True)
    reference = torch.tensor([-500.0, 0.0])
    loss = kl_penalty(logprobs, reference, "k3")
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_an_unknown_estimator_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'k4'.*k1, abs, k2, k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
