"""KL estimates, shaped rewards, rollout correction and schedules, ours and other libraries', on random batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from rlite.algorithms import (
    adaptive_kl_coef,
    behaviour_weights,
    importance_weights,
    kl_penalty,
    kl_shaped_rewards,
    last_action_rewards,
    lr_factor,
    off_policy_metrics,
    rejection_mask,
)
from tests.peers.batches import random_batch

Peer = Callable[[str], ModuleType]
VERL = "verl.trainer.ppo.rollout_corr_helper"
CLOSE = {"rtol": 1e-7, "atol": 1e-8}  # verl adds 1e-8 to counts
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}


def value_and_gradient(function: Callable[[Tensor], Tensor], logprobs: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logprobs.clone().requires_grad_()
    value = function(leaf)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_kl_estimates_and_their_gradients_equal_verl(
    peer: Peer, estimator: str, straight_through: bool, seed: int
) -> None:
    verl, batch = peer("verl.trainer.ppo.core_algos"), random_batch(seed, spread=4.0)
    theirs = value_and_gradient(
        lambda x: verl.kl_penalty(x, batch.ref_logprobs, estimator + "+" * straight_through), batch.logprobs
    )
    ours = value_and_gradient(
        lambda x: kl_penalty(x, batch.ref_logprobs, estimator, straight_through=straight_through), batch.logprobs
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_importance_weighted_kl_gradient_equals_openrlhf(peer: Peer, estimator: str, seed: int) -> None:
    openrlhf, batch = peer("openrlhf.models.utils"), random_batch(seed)
    theirs = value_and_gradient(
        lambda x: openrlhf.compute_approx_kl(x, batch.ref_logprobs, batch.old_logprobs, estimator, True),
        batch.logprobs,
    )
    weights = importance_weights(batch.logprobs, batch.old_logprobs, torch.ones_like(batch.mask), upper=10.0)
    ours = value_and_gradient(
        lambda x: kl_penalty(x, batch.ref_logprobs, estimator, straight_through=True, weights=weights),
        batch.logprobs,
    )
    torch.testing.assert_close([x.float() for x in ours], [x.float() for x in theirs], **FLOAT32)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_equal_areal(peer: Peer, estimator: str, seed: int) -> None:
    areal, batch = peer("areal.utils.data"), random_batch(seed)
    theirs = areal.KLEstimator(estimator, apply_clamp=False)(batch.logprobs, batch.ref_logprobs)
    torch.testing.assert_close(kl_penalty(batch.logprobs, batch.ref_logprobs, estimator).float(), theirs, **FLOAT32)


@pytest.mark.parametrize("seed", range(3))
def test_shaped_rewards_equal_verl_and_openrlhf(peer: Peer, seed: int) -> None:
    verl, openrlhf = peer("verl.trainer.ppo.core_algos"), peer("openrlhf.models.utils")
    batch = random_batch(seed)
    policies = (batch.logprobs, batch.ref_logprobs)
    theirs = verl.compute_rewards(batch.rewards, *policies, 0.1) * batch.mask
    torch.testing.assert_close(kl_shaped_rewards(batch.rewards, *policies, batch.mask, 0.1), theirs)

    theirs = openrlhf.compute_reward(batch.scores, 0.1, batch.logprobs - batch.ref_logprobs, batch.mask, (-1.0, 1.0))
    rewards = last_action_rewards(batch.scores.clamp(-1, 1), batch.mask)
    torch.testing.assert_close(kl_shaped_rewards(rewards, *policies, batch.mask, 0.1), theirs * batch.mask)


@pytest.mark.parametrize("peer_module", ["verl.trainer.ppo.core_algos", "openrlhf.trainer.ppo_utils.kl_controller"])
def test_adaptive_coefficient_equals_peers(peer: Peer, peer_module: str) -> None:
    controller = peer(peer_module).AdaptiveKLController(0.1, 4.0, 1000)
    coef, generator = 0.1, torch.Generator().manual_seed(0)
    for kl in (8 * torch.rand(20, generator=generator, dtype=torch.float64)).tolist():
        controller.update(kl, 64)
        coef = adaptive_kl_coef(coef, kl, target=4.0, horizon=1000, num_steps=64)
        assert coef == pytest.approx(controller.value, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("batch_normalize", [False, True])
@pytest.mark.parametrize("bounds", [(None, 1.2), (0.8, 1.2)])
@pytest.mark.parametrize("scope", ["token", "sequence"])
def test_importance_weights_equal_verl(
    peer: Peer, scope: str, bounds: tuple[float | None, float], batch_normalize: bool, seed: int
) -> None:
    lower, upper = bounds
    batch = random_batch(seed, spread=0.1)
    theirs, _ = peer(VERL).compute_rollout_correction_weights(
        batch.logprobs - batch.old_logprobs,
        batch.mask,
        scope,
        upper if lower is None else f"{lower}_{upper}",
        batch_normalize,
    )
    ours = importance_weights(
        *batch.policies,
        batch.mask,
        upper=upper,
        lower=lower,
        scope=scope,
        mode="truncate" if lower is None else "mask",
        batch_normalize=batch_normalize,
    )
    torch.testing.assert_close(ours, theirs, **CLOSE)


CRITERIA = [
    *(("token", None, estimator) for estimator in ("k1", "k2", "k3")),
    *(("sequence", over, estimator) for over in ("sum", "mean") for estimator in ("k1", "k2", "k3")),
    *(("sequence", "max", estimator) for estimator in ("k2", "k3")),
]


@pytest.mark.parametrize(("scope", "over", "estimator"), CRITERIA)
def test_rejection_masks_equal_verl(peer: Peer, scope: str, over: str | None, estimator: str) -> None:
    verl = peer(VERL)
    mode = f"token_{estimator}" if over is None else f"seq_{over}_{estimator}"
    lower, upper = (math.log(0.8), math.log(1.1)) if estimator == "k1" else (None, 0.02)
    num_rejected = 0
    for seed in range(5):
        batch = random_batch(seed, spread=0.2)
        theirs, _ = verl.compute_rollout_rejection_mask(
            batch.logprobs - batch.old_logprobs, batch.mask, mode, "0.8_1.1" if estimator == "k1" else upper
        )
        ours = rejection_mask(
            *batch.policies,
            batch.mask,
            upper=upper,
            lower=lower,
            estimator=estimator,
            scope=scope,
            over=over or "mean",
        )
        assert torch.equal(ours, theirs.bool())
        num_rejected += int(batch.mask.sum() - ours.sum())
    assert num_rejected


SEQUENCE_OR_TOKEN = [("token", "mean"), *(("sequence", over) for over in ("mean", "sum", "max"))]
BOUNDED = [("ratio", "clamp"), *((metric, "mask") for metric in ("ratio", "kl_k1", "kl_k2", "kl_k3"))]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("metric", "action"), BOUNDED)
@pytest.mark.parametrize(("level", "agg"), SEQUENCE_OR_TOKEN)
def test_bounded_behaviour_weights_equal_areal(
    peer: Peer, action: str, level: str, agg: str, metric: str, seed: int
) -> None:
    functional, options = peer("areal.utils.functional.functional"), peer("areal.api.cli_args")
    lower, upper = (0.9, 1.15) if metric == "ratio" else (None, 0.02)
    batch = random_batch(seed, spread=0.2)
    theirs = functional.apply_rejection_sampling(
        *batch.policies,
        batch.mask,
        None,
        options.RejectionSamplingConfig(level=level, action=action, metric=metric, agg=agg, upper=upper, lower=lower),
    )
    ours = behaviour_weights(
        *batch.policies,
        batch.mask,
        upper=upper,
        lower=lower,
        metric=metric.removeprefix("kl_"),
        scope=level,
        action=action,
        over=agg,
    )
    assert torch.equal(ours.kept, theirs.loss_mask.bool())
    weights = torch.where(theirs.loss_mask.bool(), theirs.behave_imp_weight, 0.0)
    torch.testing.assert_close(ours.weights.float(), weights.float(), **FLOAT32)


@pytest.mark.parametrize("seed", range(4))
def test_off_policy_metrics_equal_verl(peer: Peer, seed: int) -> None:
    batch = random_batch(seed)
    theirs = peer(VERL).compute_offpolicy_metrics(*batch.policies, batch.mask)
    ours = off_policy_metrics(*batch.policies, batch.mask)
    names = {
        "perplexity": "training_ppl",
        "log_perplexity": "training_log_ppl",
        "sampler_perplexity": "rollout_ppl",
        "sampler_log_perplexity": "rollout_log_ppl",
        "log_perplexity_gap": "log_ppl_diff",
        "log_perplexity_gap_abs": "log_ppl_abs_diff",
        "log_perplexity_gap_max": "log_ppl_diff_max",
        "log_perplexity_gap_min": "log_ppl_diff_min",
        "perplexity_ratio": "ppl_ratio",
        "chi2_sequence": "chi2_seq",
    }
    assert {key: float(value) for key, value in ours.items()} == pytest.approx(
        {key: theirs[names.get(key, key)] for key in ours}, rel=1e-7, abs=1e-9
    )


@pytest.mark.parametrize("min_factor", [0.0, 0.1])
def test_cosine_schedule_equals_verl_after_its_idle_step(peer: Peer, min_factor: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = peer("verl.utils.torch_functional").get_cosine_schedule_with_warmup(optimizer, 5, 30, min_factor)
    theirs = [schedule.lr_lambdas[0](step) for step in range(31)]
    ours = [lr_factor(step, "cosine", total_steps=30, warmup_steps=5, min_factor=min_factor) for step in range(31)]
    assert ours[:4] == pytest.approx(theirs[1:5])
    assert ours[5:] == pytest.approx(theirs[5:])
