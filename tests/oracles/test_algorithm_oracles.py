"""Our functions against numbers from widely used libraries; see README.md for the format.

Each adapter takes one case and returns our outputs under the oracle's names; names that it does not return belong to
functions that we do not have. Everything that knows a layout is computed padded and packed.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlite.algorithms import (
    aggregate,
    behaviour_weights,
    clipped_surrogate,
    cross_entropy,
    discounted_returns,
    dpo_sigmoid,
    gae,
    gather_logprobs,
    gather_logprobs_entropy,
    group_advantages,
    importance_weights,
    kl_penalty,
    masked_mean,
    masked_variance,
    masked_whiten,
    next_token,
    normalize_rewards,
    ppo_clip,
    reinforce,
    reinforce_pp_advantages,
    remax_advantages,
    reward_model_loss,
    rloo_advantages,
    sequence_log_ratio,
    to_tokens,
    value_loss,
)

HERE = Path(__file__).parent
DEFAULT_TOLERANCE = {"float64": {"rtol": 1e-9, "atol": 1e-11}, "float32": {"rtol": 1e-5, "atol": 1e-6}}
METRICS = ("*fraction", "approx_kl")


class Case:
    """One case in one layout. Attributes are its inputs as float64 tensors of the batch's shape or packed."""

    def __init__(self, raw: dict[str, Any], packed: bool) -> None:
        self.params = raw["params"]
        self.inputs = {}
        self.rows, self.cu_seqlens, self.shape = None, None, None
        shape = torch.tensor(raw["inputs"].get("mask", [])).shape
        if packed and len(shape) == 2:
            self.shape = shape
            self.cu_seqlens = torch.arange(0, shape[0] * shape[1] + 1, shape[1])
        for name, value in raw["inputs"].items():
            integral = name in ("group_ids", "labels")
            tensor = torch.tensor(value, dtype=torch.long if integral else torch.float64)
            if self.shape is not None and tensor.shape[:2] == self.shape:
                tensor = tensor.flatten(0, 1)
            self.inputs[name] = tensor

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.inputs[name]
        except KeyError as error:
            raise AttributeError(name) from error

    @property
    def layout(self) -> dict[str, Tensor | None]:
        return {"cu_seqlens": self.cu_seqlens}

    def leaf(self, name: str) -> Tensor:
        self.inputs[name].requires_grad_()
        return self.inputs[name]

    def scores(self, name: str = "token_rewards") -> Tensor:
        rewards = self.inputs[name]
        return rewards.view(self.shape or rewards.shape).sum(-1)

    def spread(self, values: Tensor) -> Tensor:
        return to_tokens(values, self.mask, **self.layout)


def aggregated(case: Case, loss: Tensor, name: str | None = None, **counts: Any) -> Tensor:
    """The oracle's five aggregations in terms of our three."""
    name = name or case.params["aggregation"]
    width = case.shape[1] if case.shape else loss.shape[-1]
    tokens, sequences = counts.get("num_tokens"), counts.get("num_sequences")
    how = {
        "token-mean": lambda: aggregate(loss, case.mask, "token", num_tokens=tokens, **case.layout),
        "token-sum": lambda: aggregate(loss, case.mask, "token", num_tokens=1, **case.layout),
        "seq-mean-token-mean": lambda: aggregate(loss, case.mask, "sequence", num_sequences=sequences, **case.layout),
        "seq-mean-token-sum": lambda: aggregate(
            loss, case.mask, "constant", num_sequences=sequences, length=1, **case.layout
        ),
        "seq-mean-token-sum-norm": lambda: aggregate(
            loss, case.mask, "constant", num_sequences=sequences, length=counts.get("length") or width, **case.layout
        ),
    }
    return how[name]()


def grad(scalar: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(scalar, leaf, retain_graph=True)[0]


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


def check_remax(case: Case) -> dict[str, Tensor]:
    returns = discounted_returns(case.token_rewards_remax, case.mask, **case.layout)
    return {
        "remax_returns": returns,
        "remax_advantages": remax_advantages(returns, case.spread(case.baseline_scores)),
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


def check_ppo_clip(case: Case) -> dict[str, Tensor]:
    p, leaf = case.params, case.leaf("logprobs")
    token = ppo_clip(
        leaf,
        case.old_logprobs,
        case.advantages,
        clip_low=p["clip_low"],
        clip_high=p["clip_high"],
        dual_clip=p["dual_clip_c"],
        weights=case.inputs.get("token_weights"),
    )
    loss = aggregated(case, token.loss)
    return {
        "loss": loss,
        "grad_logprobs": grad(loss, leaf),
        **{name: masked_mean(token.metrics[name], case.mask) for name in ("clip_fraction", "approx_kl")},
        "dual_clip_fraction": masked_mean(token.metrics["dual_clip_fraction"], case.mask),
    }


def check_reinforce(case: Case) -> dict[str, Tensor]:
    leaf = case.leaf("logprobs")
    loss = aggregated(case, reinforce(leaf, case.advantages, weights=case.inputs.get("token_weights")).loss)
    return {"loss": loss, "grad_logprobs": grad(loss, leaf)}


def check_decoupled_ppo(case: Case) -> dict[str, Tensor]:
    p, mask, leaf = case.params, case.mask, case.leaf("logprobs")
    log_ratio, advantages = leaf - case.proximal_logprobs, case.advantages
    if p["ratio_level"] == "sequence":
        log_ratio = sequence_log_ratio(log_ratio, mask, **case.layout)
        advantages = sequence_log_ratio(advantages, mask, **case.layout)
    weights, kept, outputs = None, mask, {}
    if (correction := p["behaviour_correction"]) is not None:
        weights, kept, changed = behaviour_weights(
            case.proximal_logprobs,
            case.behaviour_logprobs,
            mask,
            upper=correction["upper"],
            lower=correction["lower"],
            metric=correction["metric"].removeprefix("kl_"),
            scope=correction["level"],
            action=correction["action"],
            over=correction["agg"] or "mean",
            **case.layout,
        )
        outputs = {"kept_mask": kept, "behaviour_weight": weights, "filtered_fraction": changed.sum() / mask.sum()}
    token = clipped_surrogate(
        log_ratio,
        advantages,
        clip_low=p["clip_low"],
        clip_high=p["clip_high"],
        dual_clip=p["dual_clip_c"],
        weights=weights,
    )
    loss = aggregated(case, token.loss, "token-mean")
    return {
        **outputs,
        "loss": loss,
        "grad_logprobs": grad(loss, leaf),
        "clip_count": (token.metrics["clip_fraction"] * kept).sum(),
        "dual_clip_count": (token.metrics["dual_clip_fraction"] * kept).sum(),
    }


def check_importance_weights(case: Case) -> dict[str, Tensor]:
    p = case.params
    weights = importance_weights(
        case.train_logprobs,
        case.rollout_logprobs,
        case.mask,
        upper=p["upper"],
        lower=p["lower"],
        scope=p["level"],
        mode=p["mode"],
        batch_normalize=p["batch_normalize"],
        **case.layout,
    )
    return {"weights": weights}


def check_value_loss(case: Case) -> dict[str, Tensor]:
    leaf = case.leaf("values")
    token = value_loss(leaf, case.returns, case.old_values, clip=case.params["clip"])
    loss = aggregated(case, token.loss)
    fraction = masked_mean(token.metrics["clip_fraction"], case.mask)
    return {"loss": loss, "grad_values": grad(loss, leaf), "clip_fraction": fraction}


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


def check_preference(case: Case) -> dict[str, Tensor]:
    chosen, rejected = case.leaf("chosen_logps"), case.leaf("rejected_logps")
    pairs = (chosen, rejected, case.ref_chosen_logps, case.ref_rejected_logps)
    beta = case.params["beta"]
    loss, metrics = dpo_sigmoid(*pairs, beta=beta)
    return {
        "sigmoid": loss.mean(),
        "sigmoid_per_pair": loss,
        "sigmoid_grad_chosen": grad(loss.mean(), chosen),
        "sigmoid_grad_rejected": grad(loss.mean(), rejected),
        "chosen_rewards": metrics["chosen_rewards"],
        "rejected_rewards": metrics["rejected_rewards"],
        "reward_accuracy": metrics["accuracy"].mean(),
        "reward_margin": metrics["margin"].mean(),
        "cdpo_ls0.1": dpo_sigmoid(*pairs, beta=beta, label_smoothing=0.1).loss.mean(),
        "cdpo_ls0.3": dpo_sigmoid(*pairs, beta=beta, label_smoothing=0.3).loss.mean(),
    }


def check_reward_model(case: Case) -> dict[str, Tensor]:
    chosen, rejected = case.leaf("chosen_scores"), case.leaf("rejected_scores")
    loss, metrics = reward_model_loss(
        chosen,
        rejected,
        margin=case.margin if case.params["use_margin"] else None,
        center_coefficient=case.params["center_coefficient"] or 0.0,
    )
    return {
        "loss": loss.mean(),
        "grad_chosen": grad(loss.mean(), chosen),
        "grad_rejected": grad(loss.mean(), rejected),
        "accuracy": metrics["accuracy"].mean(),
    }


def check_sft(case: Case) -> dict[str, Tensor]:
    leaf = case.leaf("logits")
    targets = next_token(case.labels, fill=-100)
    mask = targets != -100
    token = cross_entropy(gather_logprobs(leaf, targets.clamp(min=0))).loss
    mean = aggregate(token, mask)
    outputs = {
        "token_mean": mean,
        "grad_logits_token_mean": grad(mean, leaf),
        "seq_mean_token_mean": aggregate(token, mask, "sequence"),
    }
    if (count := case.params["global_token_count"]) is not None:
        outputs["sum_over_global_count_f32"] = aggregate(token, mask, num_tokens=count)
    return outputs


ADAPTERS: dict[str, Callable[[Case], dict[str, Tensor]]] = {
    "01_gae": check_gae,
    "01b_whiten": check_whiten,
    "02_adv_grpo": check_grpo,
    "02b_group_normalization_levels": check_normalization_levels,
    "02c_adv_rloo": check_rloo,
    "02d_adv_reinforce_pp": check_reinforce_pp,
    "02e_adv_remax_gpg_opo_passk": check_remax,
    "03_kl_estimators": check_kl,
    "04a_loss_aggregation": check_aggregation,
    "04b_policy_loss_ppo_clip": check_ppo_clip,
    "04f_policy_loss_reinforce_gpg": check_reinforce,
    "04k_policy_loss_decoupled_ppo": check_decoupled_ppo,
    "04l_rollout_is_weights": check_importance_weights,
    "05a_value_loss": check_value_loss,
    "05b_logprobs_entropy": check_logprobs,
    "06a_preference_losses": check_preference,
    "06c_reward_model_loss": check_reward_model,
    "06d_sft_cross_entropy": check_sft,
}
# outputs of a file that belong to functions which we do not have
NOT_OURS = {
    "02e_adv_remax_gpg_opo_passk": ("gpg_*", "opo_*", "passk_*"),
    "04l_rollout_is_weights": ("stat_*",),
    "06a_preference_losses": (
        *("hinge*", "ipo*", "sigmoid_norm*", "robust*", "exo_pair*", "nca_pair*", "bco_pair*"),
        *("sppo_hard*", "apo_*", "discopop*", "aot*"),
    ),
}


def tolerance_of(oracle: dict[str, Any], dtype: str, output: str) -> dict[str, float]:
    for names, rule in oracle["tolerance"].items():
        if any(fnmatch.fnmatch(output, pattern.strip()) for pattern in names.split(",")):
            return rule
    if any(fnmatch.fnmatch(output, pattern) for pattern in METRICS):
        return {"rtol": 1e-6, "atol": 1e-6}
    return oracle["tolerance"].get(dtype, DEFAULT_TOLERANCE.get(dtype, {"rtol": 0.0, "atol": 0.0}))


def cases() -> list[Any]:
    found = []
    for name in ADAPTERS:
        oracle = json.loads((HERE / f"{name}.json").read_text())
        for raw in oracle["cases"]:
            found += [pytest.param(name, oracle, raw, packed, id=f"{raw['id']}-{'packed' if packed else 'padded'}")
                      for packed in ((False, True) if "mask" in raw["inputs"] else (False,))]  # fmt: skip
    return found


@pytest.mark.parametrize(("name", "oracle", "raw", "packed"), cases())
def test_values_and_gradients_equal_the_oracle(name: str, oracle: dict, raw: dict, packed: bool) -> None:
    case = Case(raw, packed)
    if "scores" in case.inputs:  # `scores` is a method of Case
        case.inputs["scores_input"] = case.inputs.pop("scores")
    outputs = ADAPTERS[name](case)
    compared = 0
    for output, figure in raw["expected"].items():
        if any(fnmatch.fnmatch(output, pattern) for pattern in NOT_OURS.get(name, ())):
            continue
        expected = torch.tensor(figure, dtype=torch.float64)
        ours = outputs[output].detach().double().reshape(expected.shape)
        where = (oracle.get("compare") or {}).get(output, "all")
        if where.startswith("where:"):
            kept = case.inputs[where.removeprefix("where:")].view(expected.shape).bool()
            expected, ours = expected[kept], ours[kept]
        rule = tolerance_of(oracle, raw["dtype"], output)
        torch.testing.assert_close(ours, expected, **rule, msg=f"{output}: found {ours}, expected {expected}")
        compared += 1
    assert compared


def test_every_oracle_of_an_algorithm_has_an_adapter() -> None:
    assert {path.stem for path in HERE.glob("0[1-6]*.json")} == set(ADAPTERS)
