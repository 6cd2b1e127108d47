"""Policy losses that treat a few tokens of the batch apart, found by a statistic over all of it: the covariance of
advantage and log-probability, or the second moment of the log ratio.

Each loss has a function of the same options that chooses the tokens. For a batch that is split, call it (through
`select_tokens`) on all of the batch, and give its answer to the parts as `selected`. Without `selected` a loss chooses
among the tokens that it sees.
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
    selected: Bool[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """PPO's clipped loss without the gradient of a random `share` of the tokens (at least one) whose covariance
    (A - mean A)(log pi - mean log pi) lies between `cov_low` and `cov_high`. Clip-Cov, arXiv:2505.22617.

    Such tokens make entropy collapse. Metrics: `cov_clip_fraction`, tokens that were drawn.
    """
    loss, metrics = clipped_surrogate(
        logprobs - old_logprobs.detach(), advantages, clip_low=clip_low, clip_high=clip_high, weights=weights
    )
    if selected is None:
        selected = draw_covariant(
            logprobs,
            old_logprobs,
            advantages,
            mask=mask,
            clip_low=clip_low,
            clip_high=clip_high,
            share=share,
            cov_low=cov_low,
            cov_high=cov_high,
            seed=seed,
        )
    return TokenLoss(torch.where(selected, 0.0, loss), {**metrics, "cov_clip_fraction": selected.to(loss.dtype)})


@torch.no_grad()
def draw_covariant(
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
) -> Bool[Tensor, "*tokens"]:
    """Return the tokens that `clip_cov` drops.

    Every token has a random number of its own, by `seed` and its place among the tokens in the mask: whether one is a
    candidate changes no other's.
    """
    _, metrics = clipped_surrogate(logprobs - old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high)
    covariance = _covariances(logprobs, advantages, mask)
    eligible = mask.bool() & (covariance > cov_low) & (covariance < cov_high) & (metrics["clip_fraction"] == 0)
    numbers = torch.rand(int(mask.bool().sum()), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    lots = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    lots[mask.bool()] = numbers.to(mask.device)
    lots = lots.masked_fill(~eligible, torch.inf)
    return _lowest(lots, _quota(share, mask)) & eligible


def kl_cov(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Shaped[Tensor, "*tokens"],
    share: float = 2e-4,
    kl_coef: float = 1.0,
    weights: Float[Tensor, "*tokens"] | None = None,
    selected: Bool[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """L = -rho A, plus kl_coef |log rho| at the `share` of the tokens (at least one) with the largest covariance
    (A - mean A)(log pi - mean log pi). KL-Cov, arXiv:2505.22617.
    """
    log_ratio = (logprobs - old_logprobs.detach()).clamp(-20.0, 20.0)
    loss = -advantages.detach() * log_ratio.exp()
    if selected is None:
        selected = largest_covariances(logprobs, old_logprobs, advantages, mask=mask, share=share)
    loss = torch.where(selected, loss + kl_coef * log_ratio.abs(), loss)
    metrics = {"approx_kl": -log_ratio.detach(), "ratio": log_ratio.detach().exp()}
    return TokenLoss(loss if weights is None else loss * weights.detach(), metrics)


@torch.no_grad()
def largest_covariances(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Shaped[Tensor, "*tokens"],
    share: float = 2e-4,
) -> Bool[Tensor, "*tokens"]:
    """Return the tokens that `kl_cov` punishes."""
    covariance = _covariances(logprobs, advantages, mask).masked_fill(~mask.bool(), float("-inf"))
    return _lowest(-covariance, _quota(share, mask))


def m2po(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Shaped[Tensor, "*tokens"],
    behaviour_logprobs: Float[Tensor, "*tokens"],
    threshold: float = 0.04,
    weights: Float[Tensor, "*tokens"] | None = None,
    selected: Bool[Tensor, "*tokens"] | None = None,
) -> TokenLoss:
    """L = -M rho A: no clip, but without the tokens that `second_moment_mask` drops between the old and the behaviour
    policy. M2PO, arXiv:2510.01161. Dropped tokens still count in the average. Metrics: `clip_fraction`, tokens dropped.
    """
    log_ratio = (logprobs - old_logprobs.detach()).clamp(-20.0, 20.0)
    if selected is None:
        selected = near_behaviour(
            logprobs, old_logprobs, advantages, mask=mask, behaviour_logprobs=behaviour_logprobs, threshold=threshold
        )
    loss = torch.where(selected, -advantages.detach() * log_ratio.exp(), 0.0)
    metrics = {
        "clip_fraction": (mask.bool() & ~selected).to(loss.dtype),
        "approx_kl": -log_ratio.detach(),
        "ratio": log_ratio.detach().exp(),
    }
    return TokenLoss(loss if weights is None else loss * weights.detach(), metrics)


def near_behaviour(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Shaped[Tensor, "*tokens"],
    behaviour_logprobs: Float[Tensor, "*tokens"],
    threshold: float = 0.04,
) -> Bool[Tensor, "*tokens"]:
    """Return the tokens that `m2po` keeps."""
    return second_moment_mask(old_logprobs - behaviour_logprobs, mask, threshold=threshold)


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


def _lowest(x: Tensor, count: int) -> Tensor:
    """Whether each value is among the `count` lowest."""
    flat = x.flatten()
    lowest = flat.topk(min(count, len(flat)), largest=False).indices
    return torch.zeros_like(flat, dtype=torch.bool).index_fill(0, lowest, True).view(x.shape)


def _quota(share: float, mask: Tensor) -> int:
    return max(int(share * int(mask.bool().count_nonzero())), 1)
