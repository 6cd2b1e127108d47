"""Policy losses that treat a few tokens of the batch apart, found by a statistic over all of it: the covariance of
advantage and log-probability, or the second moment of the log ratio.

The statistic, and the share of tokens that is chosen, are those of the tokens which the function sees: of a
microbatch, where the batch is split.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from rlite.algorithms.losses import TokenLoss, clipped_surrogate
from rlite.algorithms.reduce import masked_mean


def clip_cov(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Shaped[Tensor, "*tokens"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    seed: int = 0,
    weights: Float[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """PPO's clipped loss without the gradient of a random `share` of the tokens (at least one) whose covariance
    (A - mean A)(log pi - mean log pi) lies between `cov_low` and `cov_high`. Clip-Cov, arXiv:2505.22617.

    Such tokens make entropy collapse. They are drawn with `seed`, so that ranks which share a batch draw alike.
    Metrics: `cov_clip_fraction`, tokens that were drawn.
    """
    loss, metrics = clipped_surrogate(
        logprobs - old_logprobs.detach(), advantages, clip_low=clip_low, clip_high=clip_high, weights=weights
    )
    covariance = _covariances(logprobs, advantages, mask)
    eligible = mask.bool() & (covariance > cov_low) & (covariance < cov_high) & (metrics["clip_fraction"] == 0)
    candidates = eligible.flatten().nonzero().squeeze(-1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed)).to(candidates.device)
    is_drawn = torch.zeros_like(eligible).flatten()
    is_drawn[candidates[order[: _quota(share, mask)]]] = True
    is_drawn = is_drawn.view(loss.shape)
    return TokenLoss(torch.where(is_drawn, 0.0, loss), {**metrics, "cov_clip_fraction": is_drawn.to(loss.dtype)})


def kl_cov(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Shaped[Tensor, "*tokens"],
    share: float = 2e-4,
    kl_coef: float = 1.0,
    weights: Float[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """L = -rho A, plus kl_coef |log rho| at the `share` of the tokens (at least one) with the largest covariance
    (A - mean A)(log pi - mean log pi). KL-Cov, arXiv:2505.22617.
    """
    log_ratio = (logprobs - old_logprobs.detach()).clamp(-20.0, 20.0)
    loss = -advantages.detach() * log_ratio.exp()
    covariance = _covariances(logprobs, advantages, mask).masked_fill(~mask.bool(), float("-inf")).flatten()
    largest = covariance.topk(min(_quota(share, mask), len(covariance))).indices
    is_chosen = torch.zeros_like(covariance, dtype=torch.bool).index_fill(0, largest, True).view(loss.shape)
    loss = torch.where(is_chosen, loss + kl_coef * log_ratio.abs(), loss)
    metrics = {"approx_kl": -log_ratio.detach(), "ratio": log_ratio.detach().exp()}
    return TokenLoss(loss if weights is None else loss * weights.detach(), metrics)


def m2po(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Shaped[Tensor, "*tokens"],
    behaviour_logprobs: Float[Tensor, "*tokens"],
    threshold: float = 0.04,
    weights: Float[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """L = -M rho A: no clip, but without the tokens that `second_moment_mask` drops between the old and the behaviour
    policy. M2PO, arXiv:2510.01161. Dropped tokens still count in the average. Metrics: `clip_fraction`, tokens dropped.
    """
    log_ratio = (logprobs - old_logprobs.detach()).clamp(-20.0, 20.0)
    kept = second_moment_mask(old_logprobs - behaviour_logprobs, mask, threshold=threshold)
    loss = torch.where(kept, -advantages.detach() * log_ratio.exp(), 0.0)
    metrics = {
        "clip_fraction": (mask.bool() & ~kept).to(loss.dtype),
        "approx_kl": -log_ratio.detach(),
        "ratio": log_ratio.detach().exp(),
    }
    return TokenLoss(loss if weights is None else loss * weights.detach(), metrics)


@torch.no_grad()
def second_moment_mask(
    log_ratio: Float[Tensor, "*tokens"], mask: Shaped[Tensor, "*tokens"], *, threshold: float
) -> Bool[Tensor, "*tokens"]:
    """The mask without the tokens of largest (log ratio)^2, as few as bring the mean of the others under `threshold`;
    at least one token stays. M2PO, arXiv:2510.01161.
    """
    moments = torch.where(mask.bool(), log_ratio.double().square(), torch.inf).flatten()
    ascending, order = moments.sort()
    counts = torch.arange(1, len(moments) + 1, device=moments.device)
    # the mean of the smallest n grows with n; masked tokens are at the end and infinite
    num_kept = (ascending.cumsum(0) / counts < threshold).count_nonzero().clamp(min=1)
    kept = torch.zeros_like(moments, dtype=torch.bool).index_put((order,), counts <= num_kept)
    return kept.view(mask.shape) & mask.bool()


@torch.no_grad()
def _covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))


def _quota(share: float, mask: Tensor) -> int:
    return max(int(share * int(mask.bool().count_nonzero())), 1)
