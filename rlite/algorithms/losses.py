"""Per-token losses. Each returns the loss of every token and detached per-token metrics; `reduce.aggregate` makes
the scalar, so that averaging is decided in one place. Advantages, old log-probabilities and weights are constants.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from rlite.algorithms.importance import Metric, Scope, behaviour_weights
from rlite.algorithms.reduce import sequence_means, to_tokens


class TokenLoss(NamedTuple):
    """`loss` carries the gradient; `metrics` are detached, of the same shape, to be averaged over the mask."""

    loss: Float[Tensor, "*tokens"]
    metrics: dict[str, Float[Tensor, "*tokens"]]


def ppo_clip(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    weights: Float[Tensor, "*tokens"] | None = None,
    max_log_ratio: float = 20.0,
) -> TokenLoss:
    """L = -min(rho A, clip(rho, 1 - low, 1 + high) A), rho = exp(logprobs - old_logprobs).

    PPO (arXiv:1707.06347, eq. 7); `clip_high > clip_low` is clip-higher (DAPO, arXiv:2503.14476); `dual_clip=c`
    bounds the loss by -c A where A < 0 (arXiv:1912.09729). `weights`, e.g. truncated importance weights,
    multiply the loss.
    """
    return clipped_surrogate(
        logprobs - old_logprobs.detach(),
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        weights=weights,
        max_log_ratio=max_log_ratio,
    )


def decoupled_ppo(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    behaviour_logprobs: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    upper: float = 5.0,
    lower: float | None = None,
    metric: Metric = "ratio",
    scope: Scope = "token",
    action: Literal["mask", "clamp"] = "clamp",
    over: Literal["mean", "sum", "max"] = "mean",
    token_weights: bool = False,
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> TokenLoss:
    """L = b * L_clip(rho) with rho against the old, proximal policy and b = exp(old - behaviour), detached.

    arXiv:2110.00641; AReaL, arXiv:2505.24298. The remaining options bound b, or gate tokens and sequences, as in
    `behaviour_weights`; by default b is at most 5. Metrics: `behaviour_weight`, and `filtered_fraction`, tokens that a
    bound removed or clamped.
    """
    weights, _, changed = behaviour_weights(
        old_logprobs,
        behaviour_logprobs,
        mask,
        upper=upper,
        lower=lower,
        metric=metric,
        scope=scope,
        action=action,
        over=over,
        token_weights=token_weights,
        cu_seqlens=cu_seqlens,
    )
    loss, metrics = ppo_clip(
        logprobs,
        old_logprobs,
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        weights=weights,
    )
    return TokenLoss(loss, {**metrics, "behaviour_weight": weights, "filtered_fraction": changed.to(loss.dtype)})


def clipped_surrogate(
    log_ratio: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weights: Float[Tensor, "*tokens"] | None = None,
    max_log_ratio: float = 20.0,
) -> TokenLoss:
    """The clipped objective for any log ratio (of tokens, of sequences). Beyond `max_log_ratio` there is no gradient.

    Metrics: `clip_fraction` (the clipped branch is strictly larger), `dual_clip_fraction`, `approx_kl` (k1 of the old
    policy against the new one), `ratio`.
    """
    log_ratio = log_ratio.clamp(-max_log_ratio, max_log_ratio)
    advantages = advantages.detach()
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    is_dual_clipped = torch.zeros_like(loss, dtype=torch.bool)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        is_dual_clipped = (advantages < 0) & (loss > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    if weights is not None:
        loss = loss * weights.detach()
    metrics = {
        "clip_fraction": (clipped > unclipped).to(loss.dtype),
        "dual_clip_fraction": is_dual_clipped.to(loss.dtype),
        "approx_kl": -log_ratio.detach(),
        "ratio": ratio.detach(),
    }
    return TokenLoss(loss, metrics)


def sequence_log_ratio(
    log_ratio: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> Float[Tensor, "*tokens"]:
    """Each sequence's mean log ratio on each of its action tokens, with its gradient. GSPO, arXiv:2507.18071."""
    return to_tokens(sequence_means(log_ratio, mask, cu_seqlens), mask, cu_seqlens)


def reinforce(
    logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    weights: Float[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """L = -A log pi (Williams 1992), times `weights`. With group advantages over the share of groups that are not
    all alike it is GPG, arXiv:2504.02546."""
    loss = -advantages.detach() * logprobs
    return TokenLoss(loss if weights is None else loss * weights.detach(), {})


def value_loss(
    values: Float[Tensor, "*tokens"],
    returns: Float[Tensor, "*tokens"],
    old_values: Float[Tensor, "*tokens"] | None = None,
    *,
    clip: float | None = None,
) -> TokenLoss:
    """L = max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2; without `clip`, (v - R)^2 / 2.

    The clipped value loss of the PPO implementation in OpenAI baselines (ppo2).
    """
    unclipped = (values - returns.detach()).square()
    if clip is None or old_values is None:
        return TokenLoss(0.5 * unclipped, {"clip_fraction": torch.zeros_like(unclipped)})
    old_values = old_values.detach()
    near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    clipped = (near - returns.detach()).square()
    is_clipped = (clipped > unclipped).to(unclipped.dtype)
    return TokenLoss(0.5 * torch.maximum(unclipped, clipped), {"clip_fraction": is_clipped})


def cross_entropy(logprobs: Float[Tensor, "*tokens"]) -> TokenLoss:
    """L = -log p(token), the loss of supervised fine-tuning, from `gather_logprobs`."""
    return TokenLoss(-logprobs, {})
