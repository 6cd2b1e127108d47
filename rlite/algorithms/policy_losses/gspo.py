"""Compute GSPO: PPO's clip on the ratio of a whole sequence."""

from __future__ import annotations

from rlite.algorithms.policy_losses.base import LossInputs, register_policy_loss
from rlite.algorithms.policy_losses.ppo_clip import clipped_surrogate
from rlite.algorithms.reduce import TokenLoss


@register_policy_loss("gspo")
def gspo(
    inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4, dual_clip: float | None = None
) -> TokenLoss:
    """Return GSPO-token's loss of every token (arXiv:2507.18071).

    L_t = -min(s A_t, clip(s, 1 - low, 1 + high) A_t), s = (pi(y) / pi_old(y))^(1 / |y|).

    Each token carries its own share of the gradient, s_t = sg(s) pi_t / sg(pi_t). With one advantage per sequence it is
    GSPO, value and gradient. The paper averages by sequence. Averaged by "constant" with length 1 it is LUSPO, without
    the bias to short answers.

    Args:
        inputs: per-token tensors, `[T]` or `[B, L]`.
        clip_low: distance of the clip range below 1, as in the paper some hundred times smaller than PPO's.
        clip_high: distance of the clip range above 1.
        dual_clip: as in `ppo_clip`.

    Returns:
        The loss, and the metrics of `clipped_surrogate`.
    """
    mean = inputs.sequence_mean((inputs.logprobs - inputs.old_logprobs).detach())
    log_ratio = (mean + inputs.logprobs - inputs.logprobs.detach()).clamp(-10.0, 10.0)
    return inputs.weighted(*clipped_surrogate(log_ratio, inputs.advantages, clip_low, clip_high, dual_clip))
