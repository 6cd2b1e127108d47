"""Our losses against numbers from widely used libraries; see README.md for the format."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rlite.algorithms import (
    LossInputs,
    TokenLoss,
    aggregate,
    aot_loss,
    behaviour_weights,
    clipped_surrogate,
    cross_entropy,
    desensitised_sums,
    gather_logprobs,
    interpolated_proximal,
    kl_penalty,
    kto_loss,
    kto_reference_point,
    masked_mean,
    next_token,
    off_policy_sequence_mask,
    policy_loss,
    preference_loss,
    reward_model_loss,
    second_moment_mask,
    sequence_log_ratio,
    sequence_means,
    value_loss,
)
from tests.oracles.cases import Adapter, Case, Comparison, aggregated, comparisons, grad


def token_loss(case: Case, name: str, leaf: Tensor, **options: Any) -> TokenLoss:
    """A registered policy loss of a case's tensors; `leaf` are its log-probabilities."""
    inputs = LossInputs(
        leaf,
        case.old_logprobs,
        case.advantages,
        case.mask,
        weights=case.inputs.get("token_weights"),
        behaviour_logprobs=case.inputs.get("rollout_logprobs"),
        **case.layout,
    )
    return policy_loss(name, inputs, options)


def reduced(case: Case, token: TokenLoss, leaf: Tensor, aggregation: str | None = None) -> dict[str, Tensor]:
    """The loss, its gradient, and the means of the metrics."""
    loss = aggregated(case, token.loss, aggregation)
    means = {name: masked_mean(value, case.mask) for name, value in token.metrics.items()}
    return {"loss": loss, "grad_logprobs": grad(loss, leaf), **means}


def clip_range(case: Case) -> dict[str, float]:
    return {name: case.params[name] for name in ("clip_low", "clip_high")}


def check_ppo_clip(case: Case) -> dict[str, Tensor]:
    leaf = case.leaf("logprobs")
    token = token_loss(case, "ppo_clip", leaf, dual_clip=case.params["dual_clip_c"], **clip_range(case))
    return reduced(case, token, leaf)


def check_gspo(case: Case) -> dict[str, Tensor]:
    leaf = case.leaf("logprobs")
    return reduced(case, token_loss(case, "gspo", leaf, **clip_range(case)), leaf)


def check_cispo(case: Case) -> dict[str, Tensor]:
    leaf = case.leaf("logprobs")
    return reduced(case, token_loss(case, "cispo", leaf, **clip_range(case)), leaf)


def check_sapo(case: Case) -> dict[str, Tensor]:
    leaf = case.leaf("logprobs")
    token = token_loss(case, "sapo", leaf, tau_pos=case.params["tau_pos"], tau_neg=case.params["tau_neg"])
    return reduced(case, token, leaf)


def check_reinforce(case: Case) -> dict[str, Tensor]:
    leaf = case.leaf("logprobs")
    return reduced(case, token_loss(case, "reinforce", leaf), leaf)


def check_gmpo(case: Case) -> dict[str, Tensor]:
    leaf = case.leaf("logprobs")
    outputs = reduced(case, token_loss(case, "gmpo", leaf, **clip_range(case)), leaf, "seq-mean-token-mean")
    return {**outputs, "dual_clip_fraction": outputs["negative_clip_fraction"]}


def check_dppo(case: Case, divergence: str) -> dict[str, Tensor]:
    leaf = case.leaf("logprobs")
    options = {"divergence": divergence, "ratio_cap": case.params["ratio_cap"]} | clip_range(case)
    outputs = reduced(case, token_loss(case, "dppo", leaf, **options), leaf)
    return {**outputs, "dual_clip_fraction": outputs["capped_fraction"]}


def check_dro(case: Case) -> dict[str, Tensor]:
    leaf = case.leaf("logprobs")
    return reduced(case, token_loss(case, "dro", leaf, beta=case.params["dro_beta"]), leaf)


def check_covariance(case: Case) -> dict[str, Tensor]:
    p, leaf = case.params, case.leaf("logprobs")
    clip_cov = token_loss(
        case,
        "clip_cov",
        leaf,
        share=p["clip_cov_ratio"],
        cov_low=p["clip_cov_lower"],
        cov_high=p["clip_cov_upper"],
        **clip_range(case),
    )
    clip = reduced(case, clip_cov, leaf)
    kl_cov = token_loss(case, "kl_cov", leaf, share=p["kl_cov_ratio"], kl_coef=p["kl_coef"])
    kl = reduced(case, kl_cov, leaf)
    return {
        "clip_cov_loss": clip["loss"],
        "clip_cov_grad_logprobs": clip["grad_logprobs"],
        "clip_cov_clip_fraction": clip["cov_clip_fraction"],
        "clip_cov_approx_kl": clip["approx_kl"],
        "kl_cov_loss": kl["loss"],
        "kl_cov_grad_logprobs": kl["grad_logprobs"],
        "kl_cov_approx_kl": masked_mean(kl_cov.metrics["approx_kl"].abs(), case.mask),
    }


def check_decoupled_ppo(case: Case) -> dict[str, Tensor]:
    p, mask, leaf = case.params, case.mask, case.leaf("logprobs")
    log_ratio, advantages = leaf - case.proximal_logprobs, case.advantages
    if p["ratio_level"] == "sequence":
        log_ratio = sequence_log_ratio(log_ratio, mask, **case.layout)
        advantages = sequence_log_ratio(advantages, mask, **case.layout)
    weights, kept, outputs = 1.0, mask, {}
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
    )
    loss = aggregated(case, token.loss * weights, "token-mean")
    return {
        **outputs,
        "loss": loss,
        "grad_logprobs": grad(loss, leaf),
        "clip_count": (token.metrics["clip_fraction"] * kept).sum(),
        "dual_clip_count": (token.metrics["dual_clip_fraction"] * kept).sum(),
    }


def check_value_loss(case: Case) -> dict[str, Tensor]:
    leaf = case.leaf("values")
    token = value_loss(leaf, case.returns, case.old_values, clip=case.params["clip"])
    loss = aggregated(case, token.loss)
    fraction = masked_mean(token.metrics["clip_fraction"], case.mask)
    return {"loss": loss, "grad_values": grad(loss, leaf), "clip_fraction": fraction}


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


def check_gated_ppo(case: Case) -> dict[str, Tensor]:
    p, leaf = case.params, case.leaf("logprobs")
    token = token_loss(
        case,
        "decoupled_ppo",
        leaf,
        dual_clip=p["dual_clip_c"],
        metric=p["gate"],
        scope={"token": "token", "seq": "sequence"}[p["level"]],
        action={"mask": "mask", "clip": "clamp"}[p["mode"]],
        lower=p["bounds"][0],
        upper=p["bounds"][1],
        token_weights=True,
        **clip_range(case),
    )
    outputs = reduced(case, token, leaf)
    filtered = token.metrics["filtered_fraction"]
    if p["level"] == "seq":
        outputs["filtered_fraction"] = sequence_means(filtered, case.mask, **case.layout).mean()
    outputs["rollout_kl"] = masked_mean(case.rollout_logprobs - case.old_logprobs, case.mask)
    return outputs


def check_grpo_variant(case: Case) -> dict[str, Tensor]:
    p, leaf, variant = case.params, case.leaf("logprobs"), case.params["variant"]
    case.inputs["advantages"] = case.spread(case.sequence_advantages)
    is_sequence = p.get("ratio_level") == "sequence"
    if variant == "cispo":  # an absolute cap, and no lower bound
        token = token_loss(case, "cispo", leaf, clip_low=1.0, clip_high=p["clip_high"] - 1)
    elif variant == "sapo":
        token = token_loss(case, "sapo", leaf, tau_pos=p["tau_pos"], tau_neg=p["tau_neg"])
    elif variant == "vespo":
        token = token_loss(case, "vespo", leaf)
    else:
        token = token_loss(
            case, "gspo" if is_sequence else "ppo_clip", leaf, dual_clip=p.get("delta"), **clip_range(case)
        )
    per_token, outputs = token.loss, {}
    if (threshold := p.get("off_policy_kl_threshold")) is not None:
        kept = off_policy_sequence_mask(
            leaf, case.sampling_logprobs, case.advantages, case.mask, threshold=threshold, **case.layout
        )
        per_token = per_token * kept
    if coef := p.get("kl_coef"):
        kl = kl_penalty(leaf, case.ref_logprobs, "k3", max_log_ratio=None, max_value=None)
        if p.get("kl_is_correction"):
            kl = kl * (leaf - case.old_logprobs).exp()
        per_token = per_token + coef * kl
        outputs["kl"] = masked_mean(kl, case.mask)
    if variant in ("grpo", "sapo"):
        loss = aggregate(per_token, case.mask, "sequence", num_sequences=len(case.sequence_advantages), **case.layout)
    elif variant in ("dr_grpo", "luspo"):
        width = case.shape[1] if case.shape else case.mask.shape[1]
        length = 1 if variant == "luspo" else p.get("max_len") or width
        loss = aggregate(per_token, case.mask, "constant", length=length, **case.layout)
    else:
        loss = aggregate(per_token, case.mask, "token", **case.layout)
    outputs |= {"loss": loss, "grad_logprobs": grad(loss, leaf)}
    # fractions of tokens, or with a ratio per sequence of sequences
    ratio, positive = token.metrics["ratio"], case.advantages > 0
    low = (ratio < 1 - p["clip_low"]) & (case.advantages < 0)
    high = (ratio > 1 + p["clip_high"]) & positive
    mean = (
        (lambda x: sequence_means(x, case.mask, **case.layout).mean())
        if is_sequence
        else (lambda x: masked_mean(x, case.mask))
    )
    return outputs | {
        "clip_low_fraction": mean(low.double()),
        "clip_high_fraction": mean(high.double()),
        "clip_region_fraction": mean((low | high).double()),
        "cispo_clip_fraction": masked_mean(((ratio > p["clip_high"]) & positive).double(), case.mask),
        "sequence_weight_mean": sequence_means(
            token.metrics.get("sequence_weight", ratio), case.mask, **case.layout
        ).mean(),
    }


def check_staleness(case: Case) -> dict[str, Tensor]:
    p = case.params
    tensors = (case.logprobs, case.behaviour_logprobs, case.token_versions, p["current_version"])
    kept = second_moment_mask(case.behaviour_logprobs - case.proximal_logprobs, case.mask, threshold=p["m2_threshold"])
    return {
        "proximal_loglinear": interpolated_proximal(*tensors, space="log"),
        "proximal_linear": interpolated_proximal(*tensors, space="linear"),
        "m2_kept_mask": kept,
    }


def check_preference(case: Case) -> dict[str, Tensor]:
    chosen, rejected = case.leaf("chosen_logps"), case.leaf("rejected_logps")
    pairs = (chosen, rejected, case.ref_chosen_logps, case.ref_rejected_logps)
    beta = case.params["beta"]
    lengths = {"chosen_lengths": case.chosen_lengths, "rejected_lengths": case.rejected_lengths}

    def of(name: str, **options: float) -> Tensor:
        return preference_loss(*pairs, loss=name, beta=beta, options=options).loss

    losses = {
        "sigmoid": of("sigmoid"),
        "hinge": of("hinge"),
        "ipo": preference_loss(*pairs, loss="ipo", beta=beta, **lengths).loss,
        "sigmoid_norm": preference_loss(*pairs, beta=beta, **lengths).loss,
        "robust_ls0.1": of("robust", label_smoothing=0.1),
        "exo_pair_ls0.05": of("exo", label_smoothing=0.05),
        "nca_pair": of("nca"),
        "bco_pair": of("bco"),
        "sppo_hard": of("sppo"),
        "apo_zero": of("apo_zero"),
        "apo_down": of("apo_down"),
        "discopop": of("discopop", tau=case.params["discopop_tau"]),
        "aot": aot_loss(*pairs, beta=beta).loss,
        "aot_ls0.1": aot_loss(*pairs, beta=beta, label_smoothing=0.1).loss,
        "aot_unpaired": aot_loss(*pairs, beta=beta, paired=False).loss,
        "cdpo_ls0.1": of("sigmoid", label_smoothing=0.1),
        "cdpo_ls0.3": of("sigmoid", label_smoothing=0.3),
        "ipo_unnormalized": of("ipo"),
    }
    metrics = preference_loss(*pairs, beta=beta).metrics
    outputs = {
        "chosen_rewards": metrics["chosen_rewards"],
        "rejected_rewards": metrics["rejected_rewards"],
        "reward_accuracy": metrics["accuracy"].mean(),
        "reward_margin": metrics["margin"].mean(),
    }
    for name, loss in losses.items():
        outputs |= {
            name: loss.mean(),
            f"{name}_per_pair": loss,
            f"{name}_grad_chosen": grad(loss.mean(), chosen),
            f"{name}_grad_rejected": grad(loss.mean(), rejected),
        }
    return outputs


def check_preference_extensions(case: Case) -> dict[str, Tensor]:
    p = case.params
    chosen, rejected = case.leaf("chosen_token_logps"), case.leaf("rejected_token_logps")
    lengths = {side: case.inputs[f"{side}_mask"].sum(-1).long() for side in ("chosen", "rejected")}
    shared = torch.minimum(lengths["chosen"], lengths["rejected"])
    weight = 1.0 if p["tail_weight"] is None else p["tail_weight"]
    pairs = [
        desensitised_sums(case.inputs[f"{kind}_token_logps"], case.inputs[f"{side}_mask"], shared, tail_weight=weight)
        for kind, side in (
            ("chosen", "chosen"),
            ("rejected", "rejected"),
            ("ref_chosen", "chosen"),
            ("ref_rejected", "rejected"),
        )
    ]
    names = {"bco_pair": "bco"}
    terms = {names.get(n, n): w for n, w in zip(p["terms"], p["weights"], strict=True)}
    sft = terms.pop("sft", 0.0)
    divergence = {"js_divergence": "js"}.get(p["f_divergence"], p["f_divergence"])
    loss = preference_loss(*pairs, loss=terms, beta=p["beta"], divergence=divergence).loss.mean()
    loss = loss + sft * aggregate(cross_entropy(chosen).loss, case.chosen_mask)
    return {
        "loss": loss,
        "grad_chosen_token_logps": grad(loss, chosen),
        "grad_rejected_token_logps": grad(loss, rejected),
    }


def check_kto(case: Case) -> dict[str, Tensor]:
    p, leaf = case.params, case.leaf("logps")
    is_kto = p["variant"] == "kto"
    kl = kto_reference_point(case.kl_logps, case.kl_ref_logps) if is_kto else torch.zeros(())
    weights = {name: p[name] for name in ("desirable_weight", "undesirable_weight")}
    loss = kto_loss(leaf, case.ref_logps, case.desirable, kl=kl, beta=p["beta"], **weights).loss.mean()
    return {"loss": loss, "grad_logps": grad(loss, leaf), "kl": kl}


ADAPTERS: dict[str, Adapter] = {
    "04b_policy_loss_ppo_clip": check_ppo_clip,
    "04c_policy_loss_gspo": check_gspo,
    "04d_policy_loss_cispo": check_cispo,
    "04e_policy_loss_sapo": check_sapo,
    "04f_policy_loss_reinforce_gpg": check_reinforce,
    "04g_policy_loss_gmpo": check_gmpo,
    "04h_policy_loss_dppo_kl": partial(check_dppo, divergence="kl"),
    "04h_policy_loss_dppo_tv": partial(check_dppo, divergence="tv"),
    "04i_policy_loss_dro": check_dro,
    "04j_policy_loss_cov": check_covariance,
    "04k_policy_loss_decoupled_ppo": check_decoupled_ppo,
    "04o_policy_loss_ppo_gated_is": check_gated_ppo,
    "04p_policy_loss_grpo_variants": check_grpo_variant,
    "04q_proximal_approximation_and_m2": check_staleness,
    "05a_value_loss": check_value_loss,
    "06a_preference_losses": check_preference,
    "06b_preference_loss_extensions": check_preference_extensions,
    "06c_reward_model_loss": check_reward_model,
    "06d_sft_cross_entropy": check_sft,
    "06e_kto_loss": check_kto,
}


@pytest.mark.parametrize("comparison", comparisons(ADAPTERS))
def test_values_and_gradients_equal_the_oracle(comparison: Comparison) -> None:
    comparison.check()
