"""Advantages, shaped rewards, rollout correction and schedules against the oracles; see cases.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlite.algorithms import (
    adaptive_kl_coef,
    discounted_returns,
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    importance_weights,
    kl_penalty,
    kl_shaped_rewards,
    last_action_rewards,
    lr_factor,
    masked_mean,
    masked_whiten,
    normalize_rewards,
    off_policy_metrics,
    opo_advantages,
    optimal_token_advantages,
    pass_at_k_advantages,
    rejection_mask,
    remax_advantages,
    rloo_advantages,
    sequence_means,
    sequence_sums,
    weight_metrics,
)
from tests.oracles.cases import Adapter, Case, Comparison, comparisons, grad


def check_outcome_advantages(case: Case) -> dict[str, Tensor]:
    scores, groups = case.scores(), case.group_ids
    lengths = sequence_sums(torch.ones_like(case.token_rewards), case.mask, **case.layout)
    returns = discounted_returns(case.token_rewards_remax, case.mask, **case.layout)
    sequences = {
        "gpg_advantages": gpg_advantages(scores, groups, singleton="raw"),
        "opo_advantages": opo_advantages(scores, groups, lengths=lengths, singleton="raw"),
        "passk_advantages": pass_at_k_advantages(scores, groups),
        "passk_std_advantages": pass_at_k_advantages(scores, groups, norm_std=True),
    }
    return {
        "remax_returns": returns,
        "remax_advantages": remax_advantages(returns, case.spread(case.baseline_scores)),
        **{name: case.spread(advantages) for name, advantages in sequences.items()},
    }


def check_optimal_token_baseline(case: Case) -> dict[str, Tensor]:
    return {
        "returns": discounted_returns(case.token_rewards, case.mask, **case.layout),
        "advantages": optimal_token_advantages(
            case.token_rewards,
            case.logprobs,
            case.sum_pi_squared,
            case.mask,
            case.group_ids,
            importance_weights=case.is_weights if case.params["use_is_weights"] else None,
            zero_tail=case.params["zero_tail"],
            eps=case.params["eps"],
            **case.layout,
        ),
    }


def check_gdpo(case: Case) -> dict[str, Tensor]:
    weights, eps = case.params["weights"], case.params["eps"]
    sequences = gdpo_advantages(case.reward_components, case.group_ids, weights=weights, eps=eps, batch_norm=False)
    return {"advantages": masked_whiten(case.spread(sequences), case.mask)}


def check_sequence_variants(case: Case) -> dict[str, Tensor]:
    mode, groups, eps = case.params["mode"], case.group_ids, case.params["eps"]
    scores = torch.tensor(case.params["weights"], dtype=torch.float64) @ case.reward_components
    rloo = rloo_advantages(scores, groups)
    advantages = {
        "none": lambda: group_advantages(scores, groups),
        "group": lambda: group_advantages(scores, groups, norm_std=True, eps=eps),
        "multi_sum_then_norm": lambda: group_advantages(scores, groups, norm_std=True, eps=eps),
        "batch": lambda: normalize_rewards(scores, groups, std="batch", std_about="own_mean", eps=eps),
        "multi_norm_then_sum": lambda: gdpo_advantages(
            case.reward_components, groups, weights=case.params["weights"], eps=eps
        ),
        "rloo": lambda: rloo,
        "rloo_norm": lambda: normalize_rewards(rloo, groups, mean="batch", std="batch", eps=eps),
    }
    return {"sequence_advantages": advantages[mode]()}


def check_weighted_kl(case: Case) -> dict[str, Tensor]:
    leaf, estimator = case.leaf("logprobs"), case.params["estimator"]
    weights = (leaf - case.old_logprobs).exp().clamp(max=case.params["is_weight_clip"])
    penalty = kl_penalty(leaf, case.ref_logprobs, estimator, straight_through=True, weights=weights, max_log_ratio=None)
    return {"value": penalty.clamp(-10, 10), "grad": grad(penalty.sum(), leaf)}


def check_shaped_rewards(case: Case) -> dict[str, Tensor]:
    p = case.params
    scores = case.scores_input if p["score_clip"] is None else case.scores_input.clamp(*p["score_clip"])
    policies = (case.logprobs, case.ref_logprobs, case.mask, p["kl_coef"])
    return {
        "token_rewards": kl_shaped_rewards(case.token_scores, *policies),
        "token_rewards_score_clipped": kl_shaped_rewards(
            last_action_rewards(scores, case.mask, **case.layout), *policies
        ),
    }


def check_importance_weights(case: Case) -> dict[str, Tensor]:
    p, mask = case.params, case.mask
    policies = (case.train_logprobs, case.rollout_logprobs, mask)
    bounds = {"upper": p["upper"], "lower": p["lower"], "mode": p["mode"]}
    level = {"scope": p["level"], **case.layout}
    raw = importance_weights(*policies, upper=math.inf, max_log_ratio=math.inf, **level)
    bounded = importance_weights(*policies, **bounds, **level)
    metrics = weight_metrics(bounded, mask)
    over, under = (raw > p["upper"]).double(), (raw < (p["lower"] or 1 / p["upper"])).double()
    if p["level"] == "sequence":  # over all rows; its extremes are those of unbounded weights
        over, under = (sequence_means(x, mask, **case.layout) for x in (over, under))
        is_empty = sequence_sums(torch.ones_like(raw), mask, **case.layout) == 0
        rows = torch.where(is_empty, 1.0, sequence_means(raw, mask, **case.layout))
        metrics |= {"max": rows.max().clamp(max=math.exp(20)), "min": rows.min()}
        over, under = over.mean(), under.mean()
    else:
        over, under = masked_mean(over, mask), masked_mean(under, mask)
    return {
        "weights": importance_weights(*policies, **bounds, batch_normalize=p["batch_normalize"], **level),
        "stat_ess_fraction": metrics.pop("effective_fraction"),
        "stat_fraction_high": over,
        "stat_fraction_low": under,
        **{f"stat_{name}": value for name, value in metrics.items()},
    }


def check_rejection_mask(case: Case) -> dict[str, Tensor]:
    kept = case.mask.bool()
    for criterion in case.params["criteria"]:
        bounds = criterion["threshold"]
        if criterion["estimator"] == "k1":  # given as bounds of the ratio
            bounds = [math.log(bound) for bound in bounds]
        kept = kept & rejection_mask(
            case.train_logprobs,
            case.rollout_logprobs,
            case.mask,
            lower=bounds[0] if len(bounds) == 2 else None,
            upper=bounds[-1],
            estimator=criterion["estimator"],
            scope={"seq": "sequence"}.get(criterion["level"], criterion["level"]),
            over=criterion["agg"] or "mean",
            **case.layout,
        )
    rejected = (case.mask.bool() & ~kept).double()
    return {
        "kept_mask": kept,
        "token_rejected_fraction": masked_mean(rejected, case.mask),
        "seq_with_rejection_fraction": (sequence_sums(rejected, case.mask, **case.layout) > 0).double().mean(),
    }


def check_off_policy_metrics(case: Case) -> dict[str, Tensor]:
    mask, layout = case.mask, case.layout
    counts = case.spread(sequence_sums(torch.ones_like(case.train_logprobs), mask, **layout))
    policies = (case.train_logprobs, case.rollout_logprobs)
    ours = off_policy_metrics(*policies, mask, **layout)
    # theirs adds 1e-8 to the length of a sequence, which the exponential of its mean shows
    shrunk = off_policy_metrics(*(logprobs * counts / (counts + 1e-8) for logprobs in policies), mask, **layout)
    names = {
        "training_ppl": "perplexity",
        "training_log_ppl": "log_perplexity",
        "rollout_ppl": "sampler_perplexity",
        "rollout_log_ppl": "sampler_log_perplexity",
        "log_ppl_diff": "log_perplexity_gap",
        "log_ppl_abs_diff": "log_perplexity_gap_abs",
        "log_ppl_diff_max": "log_perplexity_gap_max",
        "log_ppl_diff_min": "log_perplexity_gap_min",
        "ppl_ratio": "perplexity_ratio",
    }
    return {
        **{name: ours[name] for name in ("kl", "k3_kl", "chi2_token")},
        "chi2_seq": ours["chi2_sequence"],
        **{theirs: shrunk[name] for theirs, name in names.items()},
    }


def check_adaptive_kl(case: Case) -> dict[str, Tensor]:
    p, coefs = case.params, [case.params["init"]]
    for kl in case.observed_kl.tolist():
        coefs.append(adaptive_kl_coef(coefs[-1], kl, target=p["target"], horizon=p["horizon"], num_steps=p["n_steps"]))
    return {"coefficient_after_update": torch.tensor(coefs[1:], dtype=torch.float64)}


def check_schedule(case: Case) -> dict[str, Tensor]:
    p, is_stable = case.params, case.params["schedule"] == "warmup_stable_decay"
    lowest = p.get("min_lr_rate", p.get("min_lr_ratio", p.get("min_lr", 0.0) / p["base_lr"]))

    def factor(step: int) -> float:
        if step < p["warmup_steps"]:  # theirs trains the first step at the rate that ours starts from
            step -= 1
        return lr_factor(
            step,
            {"linear": "linear", "constant_with_warmup": "constant"}.get(p["schedule"], "cosine"),
            total_steps=p["total_steps"],
            warmup_steps=p["warmup_steps"],
            decay_steps=p.get("num_decay_steps"),
            warmup_from=lowest if is_stable else 0.0,
            min_factor=lowest,
        )

    rates = [p["base_lr"] * factor(step) for step in range(p["total_steps"] + 1)]
    return {"lr_at_step": torch.tensor(rates, dtype=torch.float64)}


ADAPTERS: dict[str, Adapter] = {
    "02e_adv_remax_gpg_opo_passk": check_outcome_advantages,
    "02f_adv_optimal_token_baseline": check_optimal_token_baseline,
    "02g_adv_multi_reward_gdpo": check_gdpo,
    "02h_adv_sequence_level_variants": check_sequence_variants,
    "03b_kl_unbiased_gradient": check_weighted_kl,
    "03c_kl_shaped_rewards": check_shaped_rewards,
    "04l_rollout_is_weights": check_importance_weights,
    "04m_rollout_rejection_mask": check_rejection_mask,
    "04n_offpolicy_metrics": check_off_policy_metrics,
    "09a_adaptive_kl_controller": check_adaptive_kl,
    "09b_lr_schedules": check_schedule,
}
# for a report: what the peers do after the last step
NOT_OURS = {"09b_lr_schedules": ("peer_lr_past_end",)}


@pytest.mark.parametrize("comparison", comparisons(ADAPTERS, NOT_OURS))
def test_values_and_gradients_equal_the_oracle(comparison: Comparison) -> None:
    comparison.check()
