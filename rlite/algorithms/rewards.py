"""Rewards of tokens: a score on the last action, the price of leaving the reference policy, and its control."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from rlite.algorithms.kl import KLEstimator, kl_penalty
from rlite.algorithms.reduce import sequence_index
from rlite.errors import ConfigError


@torch.no_grad()
def last_action_rewards(
    scores: Float[Tensor, " sequences"],
    mask: Shaped[Tensor, "*tokens"],
    *,
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> Float[Tensor, "*tokens"]:
    """Each sequence's score on its last token where the mask is 1, 0 elsewhere; a sequence without one loses it."""
    index = sequence_index(mask, cu_seqlens).flatten()
    places = torch.arange(len(index), device=index.device).masked_fill(~mask.flatten().bool(), -1)
    last = places.new_full((len(scores) + 1,), -1).scatter_reduce(0, index, places, "amax")[:-1]
    rewards = scores.new_zeros(len(index) + 1)
    rewards[last] = scores  # -1 is the place beyond the end
    return rewards[:-1].view(mask.shape)


@torch.no_grad()
def kl_shaped_rewards(
    rewards: Float[Tensor, "*tokens"],
    logprobs: Float[Tensor, "*tokens"],
    ref_logprobs: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    coef: float,
    *,
    estimator: KLEstimator = "k1",
) -> Float[Tensor, "*tokens"]:
    """r_t - coef KL_t where the mask is 1, 0 elsewhere. RLHF, arXiv:2203.02155 (eq. 2, there with k1)."""
    return torch.where(mask.bool(), rewards - coef * kl_penalty(logprobs, ref_logprobs, estimator), 0.0)


def adaptive_kl_coef(coef: float, kl: float, *, target: float, horizon: float, num_steps: float) -> float:
    """The coefficient after `num_steps` (of sequences, say) with a mean KL of `kl`.

    coef (1 + clip(kl / target - 1, -0.2, 0.2) num_steps / horizon): proportional control in log space, which closes
    in on the target within about 5 horizons. arXiv:1909.08593, section 2.2.

    Raises: ConfigError for a target or horizon that is not positive.
    """
    if target <= 0 or horizon <= 0:
        raise ConfigError(f"target={target}, horizon={horizon}: both must be positive")
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_steps / horizon)
