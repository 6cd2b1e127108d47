"""REINFORCE."""

from __future__ import annotations

from rlite.algorithms.policy_losses.base import LossInputs, register_policy_loss
from rlite.algorithms.reduce import TokenLoss


@register_policy_loss("reinforce")
def reinforce(inputs: LossInputs) -> TokenLoss:
    """Return REINFORCE's loss of every token.

    L = -A log pi (Williams 1992). With the advantages "gpg" it is GPG, arXiv:2504.02546.

    The old policy has no part in it. There are no metrics.
    """
    return inputs.weighted(-inputs.advantages * inputs.logprobs, {})
