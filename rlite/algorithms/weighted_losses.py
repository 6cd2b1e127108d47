"""Policy losses without a hard clip of the surrogate: the importance ratio is a detached weight of log pi, a soft
gate, or a quadratic penalty. Every token keeps the gradient that its weight leaves it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from rlite.algorithms.kl import BinaryDivergence, binary_divergence
from rlite.algorithms.losses import TokenLoss, reinforce
from rlite.algorithms.reduce import sequence_sums, to_tokens

MAX_LOG_RATIO = 20.0
"""ratios are taken between exp(-20) and exp(20)"""


def cispo(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    weights: Float[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """L = -sg(clip(rho, 1 - low, 1 + high)) A log pi. CISPO, MiniMax-M1, arXiv:2506.13585.

    By default without a lower bound, as in the paper, and with the cap of 5 of ScaleRL (arXiv:2510.13786).
    """
    log_ratio = _log_ratio(logprobs, old_logprobs)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss, _ = reinforce(logprobs, advantages, weights=clipped if weights is None else clipped * weights)
    return TokenLoss(loss, _metrics(log_ratio) | {"clip_fraction": (clipped != ratio).to(loss.dtype)})


def dppo(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    divergence: BinaryDivergence = "tv",
    clip_low: float = 0.15,
    clip_high: float = 0.15,
    ratio_cap: float = 20.0,
    weights: Float[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """L = -M sg(min(rho, cap)) A log pi, where M = 0 for a token whose probability already went the way that A pushes
    it, by a divergence over `clip_high` (A > 0) or `clip_low`. DPPO, arXiv:2602.04879.

    The divergence is that of the sampled token against all others: total variation |p - p_old|, or the KL of
    (p_old, 1 - p_old) from (p, 1 - p), for which 0.05 is a bound of the same order as 0.15 for "tv".
    """
    log_ratio = _log_ratio(logprobs, old_logprobs)
    with torch.no_grad():
        moved = binary_divergence(old_logprobs, logprobs, divergence)
        rises = advantages > 0
        has_left = torch.where(rises, logprobs > old_logprobs, logprobs < old_logprobs)
        is_clipped = has_left & (moved > _where(rises, clip_high, clip_low, like=moved))
        ratio = log_ratio.exp()
        weight = torch.where(is_clipped, 0.0, ratio.clamp(max=ratio_cap))
    loss, _ = reinforce(logprobs, advantages, weights=weight if weights is None else weight * weights)
    return TokenLoss(
        loss,
        _metrics(log_ratio)
        | {
            "clip_fraction": is_clipped.to(loss.dtype),
            "capped_fraction": ((ratio > ratio_cap) & ~is_clipped).to(loss.dtype),
        },
    )


def sapo(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    weights: Float[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """L = -(4 / tau) sigmoid(tau (rho - 1)) A, tau = tau_pos where A > 0, else tau_neg. SAPO, arXiv:2511.20347.

    At rho = 1 the gradient is that of PPO; away from it, it fades smoothly. The paper averages by sequence.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs)
    tau = _where(advantages > 0, tau_pos, tau_neg, like=log_ratio)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    return TokenLoss(_weighted(-gate * advantages.detach(), weights), _metrics(log_ratio))


def dro(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    beta: float = 0.1,
    weights: Float[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """L = -A log pi + beta / 2 (log pi - log pi_old)^2. DRO, arXiv:2405.19107, per token and with A for R - V."""
    log_ratio = logprobs - old_logprobs.detach()
    loss = 0.5 * beta * log_ratio.square() - advantages.detach() * logprobs
    return TokenLoss(_weighted(loss, weights), _metrics(log_ratio))


def vespo(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Shaped[Tensor, "*tokens"],
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
    weights: Float[Tensor, "*tokens"] | None = None,
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> TokenLoss:
    """L = -sg(phi(W)) A log pi, phi(W) = W^k exp(lambda (1 - W)), W the ratio of the whole sequence.

    VESPO, arXiv:2602.10693; k and lambda of one sign of A each. `weights` enter into W.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs)
    with torch.no_grad():
        per_token = log_ratio if weights is None else log_ratio + weights.log()
        log_w = to_tokens(sequence_sums(per_token, mask, cu_seqlens), mask, cu_seqlens)
        log_w = log_w.clamp(_LOG_SMALLEST_WEIGHT, MAX_LOG_RATIO)
        k = _where(advantages >= 0, k_pos, k_neg, like=log_w)
        rate = _where(advantages >= 0, lambda_pos, lambda_neg, like=log_w)
        phi = (k * log_w + rate * (1 - log_w.exp())).exp()
    loss, _ = reinforce(logprobs, advantages, weights=phi)
    return TokenLoss(loss, _metrics(log_ratio) | {"sequence_weight": phi})


_LOG_SMALLEST_WEIGHT = -18.420680743952367  # log 1e-8


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _where(condition: Tensor, yes: float, no: float, *, like: Tensor) -> Tensor:
    # of two plain numbers torch.where would make float32
    return torch.where(condition, torch.full_like(like.detach(), yes), no)


def _weighted(loss: Tensor, weights: Tensor | None) -> Tensor:
    return loss if weights is None else loss * weights.detach()


def _metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    log_ratio = log_ratio.detach()
    return {"approx_kl": -log_ratio, "ratio": log_ratio.exp()}
