"""Our functions against numbers from widely used libraries; see README.md for the format.

Each adapter takes one case and returns our outputs under the oracle's names; names that it does not return belong to
functions that we do not have.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from rlite.algorithms import (
    discounted_returns,
    gae,
    gather_logprobs_entropy,
    group_advantages,
    kl_penalty,
    masked_mean,
    masked_variance,
    masked_whiten,
    normalize_rewards,
    reinforce_pp_advantages,
    rloo_advantages,
)
from tests.oracles.cases import HERE, Adapter, Case, Comparison, aggregated, comparisons, grad


def check_gae(case: Case) -> dict[str, Tensor]:
    gamma, lam = case.params["gamma"], case.params["lam"]
    advantages, returns = gae(case.token_rewards, case.values, case.mask, gamma, lam, **case.layout)
    return {
        "advantages": advantages,
        "returns": returns,
        "advantages_whitened": masked_whiten(advantages, case.mask),
    }


def check_whiten(case: Case) -> dict[str, Tensor]:
    x, mask = case.x, case.mask
    rows = zip(x.view(case.shape or x.shape), mask.view(case.shape or x.shape), strict=True)
    return {
        "unbiased_eps_in_var": masked_whiten(x, mask, shift_mean=case.params["shift_mean"]),
        "masked_mean": masked_mean(x, mask),
        "masked_var_unbiased": masked_variance(x, mask),
        "masked_var_biased": masked_variance(x, mask, unbiased=False),
        "per_row_biased": torch.cat([masked_whiten(row, m, unbiased=False) for row, m in rows]),
    }


def check_grpo(case: Case) -> dict[str, Tensor]:
    scores = group_advantages(
        case.scores(),
        case.group_ids,
        norm_std=case.params["normalize_by_std"],
        eps=case.params["eps"],
        singleton="raw",
    )
    if case.params["normalize_by_std"]:  # the oracle divides a group of one by 1 + eps, in float32
        is_single = torch.bincount(case.group_ids)[case.group_ids] == 1
        scores = torch.where(is_single, scores / float(torch.tensor(1.0) + case.params["eps"]), scores)
    return {"advantages": case.spread(scores)}


def check_normalization_levels(case: Case) -> dict[str, Tensor]:
    p = case.params
    masked = "mask" in case.inputs
    scores = case.scores_input[case.mask.bool()] if masked else case.scores_input
    normalized = normalize_rewards(
        scores,
        torch.zeros(len(scores), dtype=torch.long) if masked else case.group_ids,
        mean=p["mean_level"],
        std=p["std_level"],
        leave_one_out=p["mean_leave_one_out"],
        unbiased=p["std_unbiased"],
        eps=p["eps"],
    )
    if masked:
        normalized = torch.zeros_like(case.mask).masked_scatter(case.mask.bool(), normalized)
    return {"normalized": normalized}


def check_rloo(case: Case) -> dict[str, Tensor]:
    raw, zero = (rloo_advantages(case.scores(), case.group_ids, singleton=single) for single in ("raw", "zero"))
    return {"advantages": case.spread(raw), "advantages_singleton_zero": case.spread(zero)}


def check_reinforce_pp(case: Case) -> dict[str, Tensor]:
    gamma, rewards = case.params["gamma"], case.token_rewards
    return {
        "reinforce_pp_advantages": reinforce_pp_advantages(rewards, case.mask, gamma, **case.layout),
        "reinforce_pp_returns": discounted_returns(rewards, case.mask, gamma, **case.layout),
        "reinforce_pp_baseline_advantages": reinforce_pp_advantages(
            rewards, case.mask, group_ids=case.group_ids, singleton="raw", **case.layout
        ),
    }


def check_kl(case: Case) -> dict[str, Tensor]:
    outputs = {}
    leaf = case.leaf("logprobs")
    for name, estimator in {"k1": "k1", "abs": "abs", "k2": "k2", "k3_clamped": "k3"}.items():
        for suffix, straight_through in {"": False, "_straight_through": True}.items():
            value = kl_penalty(leaf, case.ref_logprobs, estimator, straight_through=straight_through)
            outputs |= {f"{name}{suffix}": value, f"{name}{suffix}_grad": grad(value.sum(), leaf)}
    for name in ("k1", "k2", "k3"):
        outputs[f"{name}_unclamped_f32"] = kl_penalty(
            leaf.float(), case.ref_logprobs.float(), name, max_log_ratio=None, max_value=None
        )
    return outputs


def check_aggregation(case: Case) -> dict[str, Tensor]:
    p = case.params
    counts = {"num_tokens": p["global_token_count"], "num_sequences": p["global_seq_count"], "length": p["norm_length"]}
    names = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    return {name: p["dp_size"] * aggregated(case, case.x, name, **counts) for name in names}


def check_logprobs(case: Case) -> dict[str, Tensor]:
    leaf = case.leaf("logits")
    logprobs, entropies = gather_logprobs_entropy(leaf, case.labels, case.params["temperature"], chunk_size=3)
    return {
        "logprobs": logprobs,
        "entropy": entropies,
        "grad_sum_logprobs_wrt_logits": grad(logprobs.sum(), leaf),
        "grad_sum_entropy_wrt_logits": grad(entropies.sum(), leaf),
        "mean_entropy_over_mask": masked_mean(entropies, case.mask),
    }


ADAPTERS: dict[str, Adapter] = {
    "01_gae": check_gae,
    "01b_whiten": check_whiten,
    "02_adv_grpo": check_grpo,
    "02b_group_normalization_levels": check_normalization_levels,
    "02c_adv_rloo": check_rloo,
    "02d_adv_reinforce_pp": check_reinforce_pp,
    "03_kl_estimators": check_kl,
    "04a_loss_aggregation": check_aggregation,
    "05b_logprobs_entropy": check_logprobs,
}


@pytest.mark.parametrize("comparison", comparisons(ADAPTERS))
def test_values_and_gradients_equal_the_oracle(comparison: Comparison) -> None:
    comparison.check()


def test_every_oracle_of_an_algorithm_has_an_adapter() -> None:
    modules = [importlib.import_module(f"tests.oracles.{path.stem}") for path in HERE.glob("test_*_oracles.py")]
    adapted = {name for module in modules for name in getattr(module, "ADAPTERS", ())}
    assert {path.stem for path in HERE.glob("0[1-69]*.json")} == adapted
