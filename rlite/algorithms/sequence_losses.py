"""Policy losses whose ratio belongs to a whole sequence. Each still gives a value per token, the sequence's at each of
its tokens, so that `aggregate` decides the average; their papers average by sequence.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rlite.algorithms.losses import TokenLoss, clipped_surrogate, sequence_log_ratio


def gspo(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Shaped[Tensor, "*tokens"],
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    weights: Float[Tensor, "*tokens"] | None = None,
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> TokenLoss:
    """L_t = -min(s A_t, clip(s, 1 - low, 1 + high) A_t), s = (pi(y) / pi_old(y))^(1 / |y|), of which each token carries
    its own share of the gradient: s_t = sg(s) pi_t / sg(pi_t).

    GSPO-token, arXiv:2507.18071; with one advantage for the sequence it is GSPO, value and gradient.
    The clip range is that of the paper, some hundred times narrower than PPO's. Averaged by "constant" with length 1
    it is LUSPO, without the bias to short answers.
    """
    log_ratio = logprobs - old_logprobs.detach()
    log_ratio = sequence_log_ratio(log_ratio.detach(), mask, cu_seqlens) + logprobs - logprobs.detach()
    return clipped_surrogate(
        log_ratio,
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        weights=weights,
        max_log_ratio=10.0,
    )


def gmpo(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Shaped[Tensor, "*tokens"],
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    weights: Float[Tensor, "*tokens"] | None = None,
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> TokenLoss:
    """L = -mean(A) prod_t |min(rho_t A, clip(rho_t, e^-low, e^high) A)|^(1 / |y|) with the sign of A: the geometric
    mean of the tokens' clipped ratios. GMPO, arXiv:2507.20673; the bounds are of log rho, as in the paper.

    `weights` enter by their geometric mean. Metrics: `clip_fraction`, tokens clipped where A > 0, and
    `negative_clip_fraction`, where A < 0.
    """
    log_ratio = logprobs - old_logprobs.detach()
    near = log_ratio.clamp(-clip_low, clip_high)
    pessimistic = torch.where(advantages < 0, torch.maximum(log_ratio, near), torch.minimum(log_ratio, near))
    mean = sequence_log_ratio(torch.where(advantages == 0, 0.0, pessimistic), mask, cu_seqlens)
    if weights is not None:
        mean = mean + sequence_log_ratio((weights.detach() + 1e-10).log(), mask, cu_seqlens)
    loss = -sequence_log_ratio(advantages.detach(), mask, cu_seqlens) * mean.clamp(max=20.0).exp()
    is_clipped = log_ratio.detach() != near.detach()
    return TokenLoss(
        loss,
        {
            "clip_fraction": (is_clipped & (advantages > 0)).to(loss.dtype),
            "negative_clip_fraction": (is_clipped & (advantages < 0)).to(loss.dtype),
            "approx_kl": -log_ratio.detach(),
            "ratio": log_ratio.detach().exp(),
        },
    )


@torch.no_grad()
def off_policy_sequence_mask(
    logprobs: Float[Tensor, "*tokens"],
    sampler_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    *,
    threshold: float,
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> Bool[Tensor, "*tokens"]:
    """The mask without the tokens with A < 0 of sequences that the policy has left: mean(log mu - log pi) > threshold.

    DeepSeek-V3.2, arXiv:2512.02556. The loss is still averaged over the whole mask: multiply it by this one.
    """
    distance = sequence_log_ratio(sampler_logprobs - logprobs, mask, cu_seqlens)
    return mask.bool() & ~((advantages < 0) & (distance > threshold))
