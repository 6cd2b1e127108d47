from __future__ import annotations

import math

import pytest
import torch

from rlite.algorithms import (
    behaviour_weights,
    decoupled_ppo,
    importance_weights,
    kl_penalty,
    ppo_clip,
    sequence_log_ratio,
    value_loss,
)
from rlite.errors import ConfigError


@pytest.mark.parametrize(
    ("ratio", "advantage", "has_gradient"),
    [
        (1.27, 1.0, True),
        (1.29, 1.0, False),
        (0.5, 1.0, True),
        (0.79, -1.0, False),
        (0.81, -1.0, True),
        (2.0, -1.0, True),
        (3.1, -1.0, False),
    ],
)
def test_the_clip_range_is_one_minus_low_to_one_plus_high(ratio: float, advantage: float, has_gradient: bool) -> None:
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    token = ppo_clip(logprobs, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    token.loss.sum().backward()
    assert (logprobs.grad.abs().item() > 0) == has_gradient
    is_clipped = token.metrics["clip_fraction"] + token.metrics["dual_clip_fraction"]
    assert bool(is_clipped.item()) != has_gradient


def test_at_the_old_policy_the_gradient_is_the_advantage() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([0.5, -2.0, 0.0], requires_grad=True)
    ppo_clip(logprobs, logprobs, advantages).loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages.detach())
    assert advantages.grad is None


def test_decoupled_ppo_clips_about_the_proximal_policy_and_weighs_by_the_behaviour_policy() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    proximal = torch.tensor([-1.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-1.5, -3.0], requires_grad=True)
    token = decoupled_ppo(
        logprobs, proximal, torch.ones(2), behaviour_logprobs=behaviour, mask=torch.ones(2), upper=5.0
    )
    token.loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, -torch.tensor([math.exp(0.5), 5.0]))
    assert proximal.grad is None
    assert behaviour.grad is None


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


def test_the_sequence_ratio_spreads_its_gradient_over_the_sequence() -> None:
    log_ratio = torch.tensor([0.2, 0.4, 7.0, 1.0], requires_grad=True)
    spread = sequence_log_ratio(log_ratio, torch.tensor([1, 1, 0, 1]), torch.tensor([0, 3, 4]))
    torch.testing.assert_close(spread, torch.tensor([0.3, 0.3, 0.0, 1.0]))
    spread[0].backward()
    assert log_ratio.grad.tolist() == [0.5, 0.5, 0.0, 0.0]


def test_the_value_clip_keeps_the_larger_error() -> None:
    values = torch.tensor([0.0, 1.0], requires_grad=True)
    token = value_loss(values, torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 0.0]), clip=0.5)
    assert token.loss.tolist() == [1.125, 0.125]
    assert token.metrics["clip_fraction"].tolist() == [1.0, 1.0]
    token.loss.sum().backward()
    assert values.grad.tolist() == [0.0, 0.0]


def test_a_wild_log_ratio_keeps_losses_finite() -> None:
    logprobs = torch.tensor([0.0, -500.0], requires_grad=True)
    reference = torch.tensor([-500.0, 0.0])
    loss = kl_penalty(logprobs, reference, "k3") + ppo_clip(logprobs, reference, torch.ones(2)).loss
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_an_unknown_estimator_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'k4'.*k1, abs, k2, k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
