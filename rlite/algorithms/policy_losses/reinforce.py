"""Compute the loss of REINFORCE."""

from __future__ import annotations

from rlite.algorithms.policy_losses.base import LossInputs, register_policy_loss
from rlite.algorithms.reduce import TokenLoss


@register_policy_loss("reinforce")
def reinforce(inputs: LossInputs) -> TokenLoss:
    """Return REINFORCE's loss of every token (Williams 1992).

    L = -A log pi. With the advantages "gpg" it is GPG, arXiv:2504.02546. The loss does not use the old policy and has
    no metrics.
    """
    return inputs.weighted(-inputs.advantages * inputs.logprobs, {})
