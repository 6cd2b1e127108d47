"""Advantages, ours and other libraries', on random batches."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from rlite.algorithms import (
    discounted_returns,
    gae,
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    masked_whiten,
    normalize_rewards,
    opo_advantages,
    optimal_token_advantages,
    pass_at_k_advantages,
    reinforce_pp_advantages,
    remax_advantages,
    rloo_advantages,
    to_tokens,
)
from tests.peers.batches import GROUP_SIZE, LENGTH, Batch, random_batch

Peer = Callable[[str], ModuleType]
VERL = "verl.trainer.ppo.core_algos"
CLOSE = {"rtol": 1e-7, "atol": 1e-8}  # verl adds 1e-8 to counts
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}


def spread(advantages: Tensor, batch: Batch) -> Tensor:
    return to_tokens(advantages, batch.mask)


OUTCOME: dict[str, tuple[str, dict, Callable[[Batch], Tensor]]] = {
    "GRPO": (
        "compute_grpo_outcome_advantage",
        {},
        lambda b: spread(group_advantages(b.scores, b.group_ids, norm_std=True), b),
    ),
    "Dr. GRPO": (
        "compute_grpo_outcome_advantage",
        {"norm_adv_by_std_in_grpo": False},
        lambda b: spread(group_advantages(b.scores, b.group_ids), b),
    ),
    "RLOO": ("compute_rloo_outcome_advantage", {}, lambda b: spread(rloo_advantages(b.scores, b.group_ids), b)),
    "GPG": ("compute_gpg_outcome_advantage", {}, lambda b: spread(gpg_advantages(b.scores, b.group_ids), b)),
    "OPO": (
        "compute_opo_outcome_advantage",
        {},
        lambda b: spread(opo_advantages(b.scores, b.group_ids, lengths=b.mask.sum(-1)), b),
    ),
    "pass@k": (
        "compute_grpo_passk_outcome_advantage",
        {"config": {"norm_adv_by_std_in_grpo": False}},
        lambda b: spread(pass_at_k_advantages(b.scores, b.group_ids), b),
    ),
    "pass@k over std": (
        "compute_grpo_passk_outcome_advantage",
        {"config": {"norm_adv_by_std_in_grpo": True}},
        lambda b: spread(pass_at_k_advantages(b.scores, b.group_ids, norm_std=True), b),
    ),
    "REINFORCE++ baseline": (
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        {},
        lambda b: reinforce_pp_advantages(b.rewards, b.mask, group_ids=b.group_ids),
    ),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", OUTCOME)
def test_outcome_advantages_equal_verl(peer: Peer, name: str, seed: int) -> None:
    function, options, ours = OUTCOME[name]
    batch = random_batch(seed)
    theirs, _ = getattr(peer(VERL), function)(batch.rewards.clone(), batch.mask, index=batch.index, **options)
    torch.testing.assert_close(ours(batch), theirs, **CLOSE)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95)])
def test_gae_equals_verl(peer: Peer, gamma: float, lam: float, seed: int) -> None:
    batch = random_batch(seed)
    white, returns = peer(VERL).compute_gae_advantage_return(batch.rewards, batch.values, batch.mask, gamma, lam)
    ours, our_returns = gae(batch.rewards, batch.values, batch.mask, gamma, lam)
    torch.testing.assert_close(our_returns, returns * batch.mask)
    torch.testing.assert_close(masked_whiten(ours, batch.mask), white * batch.mask, **CLOSE)


@pytest.mark.parametrize("seed", range(4))
def test_returns_whitened_over_tokens_equal_verls_reinforce_plus_plus(peer: Peer, seed: int) -> None:
    batch = random_batch(seed)
    theirs, returns = peer(VERL).compute_reinforce_plus_plus_outcome_advantage(
        batch.rewards, batch.mask, config=SimpleNamespace(gamma=0.97)
    )
    torch.testing.assert_close(reinforce_pp_advantages(batch.rewards, batch.mask, 0.97), theirs, **CLOSE)
    torch.testing.assert_close(discounted_returns(batch.rewards, batch.mask, 0.97), returns * batch.mask)


@pytest.mark.parametrize("seed", range(4))
def test_remax_equals_verl(peer: Peer, seed: int) -> None:
    batch, greedy = random_batch(seed), random_batch(seed + 100).scores
    theirs, _ = peer(VERL).compute_remax_outcome_advantage(batch.rewards, greedy, batch.mask)
    # the reward is on the first token, which is an action: an outcome's advantage stands there
    torch.testing.assert_close(remax_advantages(batch.scores, greedy), theirs[:, 0])


@pytest.mark.parametrize("seed", range(4))
def test_gdpo_equals_verl(peer: Peer, seed: int) -> None:
    batch, second = random_batch(seed, has_holes=False), random_batch(seed + 100).scores
    prompts = torch.zeros(len(second), 2)
    theirs, _ = peer(VERL).compute_gdpo_outcome_advantage(
        batch.rewards.float(),
        batch.mask,
        batch.index,
        config={"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={"a": batch.scores.numpy(), "b": second.numpy()},
        batch={"prompts": prompts, "attention_mask": torch.cat([prompts + 1, batch.mask], 1).long()},
    )
    sequences = gdpo_advantages(
        torch.stack([batch.scores, second]), batch.group_ids, weights=[1.0, 0.5], batch_norm=False
    )
    torch.testing.assert_close(masked_whiten(spread(sequences, batch), batch.mask), theirs.double(), **FLOAT32)


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("zero_tail", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_optimal_token_baseline_equals_verl_with_several_turns(
    peer: Peer, seed: int, zero_tail: bool, has_weights: bool
) -> None:
    batch = random_batch(seed)
    sum_pi_squared = batch.values.sigmoid()
    weights = (batch.logprobs - batch.old_logprobs).exp() if has_weights else None
    theirs, _ = peer(VERL).compute_multi_turn_optimal_token_baseline_advantage(
        batch.rewards,
        batch.mask,
        batch.index,
        batch.old_logprobs,
        sum_pi_squared,
        rollout_is_weights=weights,
        handle_zero_tail=zero_tail,
    )
    ours = optimal_token_advantages(
        batch.rewards,
        batch.old_logprobs,
        sum_pi_squared,
        batch.mask,
        batch.group_ids,
        importance_weights=weights,
        zero_tail=zero_tail,
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mean", ["group", "batch", None])
@pytest.mark.parametrize("std", ["group", "batch", None])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_every_normalisation_equals_areal(
    peer: Peer, mean: str | None, std: str | None, unbiased: bool, leave_one_out: bool
) -> None:
    data, options = peer("areal.utils.data"), peer("areal.api.cli_args")
    config = options.NormConfig(
        mean_level=mean,
        std_level=std,
        mean_leave1out=leave_one_out,
        std_unbiased=unbiased,
        group_size=GROUP_SIZE,
        eps=1e-5,
    )
    batch = random_batch(7)
    scores = batch.scores + batch.values[:, 0]  # no ties: theirs divides rounding by rounding
    ours = normalize_rewards(
        scores, batch.group_ids, mean=mean, std=std, leave_one_out=leave_one_out, unbiased=unbiased, eps=1e-5
    )
    torch.testing.assert_close(ours.float(), data.Normalization(config)(scores), **FLOAT32)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimator", ["gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"])
def test_advantages_equal_openrlhf_without_holes(peer: Peer, estimator: str, seed: int) -> None:
    batch = random_batch(seed, has_holes=False)
    mask, scores, groups = batch.mask, batch.scores, batch.group_ids
    gamma, lam = (0.98, 0.9) if estimator in ("gae", "reinforce") else (1.0, 1.0)
    theirs = openrlhf_advantages(peer, estimator, batch, gamma, lam)

    last = torch.zeros_like(mask).scatter(1, mask.long().sum(-1, keepdim=True) - 1, scores[:, None])
    white = lambda x: masked_whiten(x, mask, unbiased=False)  # noqa: E731
    ours = {
        "gae": lambda: white(gae(last, batch.values, mask, gamma, lam)[0]),
        "reinforce": lambda: white(discounted_returns(last, mask, gamma)),
        "reinforce_baseline": lambda: white(spread(group_advantages(scores, groups), batch)),
        "rloo": lambda: spread(rloo_advantages(scores, groups), batch),
        "group_norm": lambda: spread(group_advantages(scores, groups, norm_std=True, eps=1e-9), batch),
        "dr_grpo": lambda: spread(group_advantages(scores, groups), batch),
    }
    torch.testing.assert_close(ours[estimator]().float(), (theirs * mask).float(), **FLOAT32)


def openrlhf_advantages(peer: Peer, estimator: str, batch: Batch, gamma: float, lam: float) -> Tensor:
    maker_class = peer("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    maker = object.__new__(maker_class)  # its engines are not needed here
    advantage = SimpleNamespace(estimator=estimator, gamma=gamma, lambd=lam, no_std_norm=False)
    maker.strategy = SimpleNamespace(
        args=SimpleNamespace(
            algo=SimpleNamespace(advantage=advantage),
            reward=SimpleNamespace(clip_range=None),
            rollout=SimpleNamespace(n_samples_per_prompt=GROUP_SIZE),
        )
    )
    maker.advantage_estimator, maker.kl_ctl = estimator, SimpleNamespace(value=0.0)
    experience = SimpleNamespace(
        index=list(np.arange(len(batch.scores))),
        rewards=batch.scores,
        kl=torch.zeros(len(batch.scores), LENGTH, dtype=torch.float64),
        values=batch.values,
        action_mask=batch.mask,
        info={},
    )
    return maker.compute_advantages_and_returns([experience])[0].advantages
