"""Choose the tokens of a whole batch that a loss treats differently, such as by covariance in `clip_cov`, `kl_cov`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlite.algorithms.policy_losses.base import POLICY_LOSSES, SELECTIONS, LossInputs, PolicyLossFunction
from rlite.algorithms.reduce import Configured, check_result, masked_mean
from rlite.algorithms.shapes import Flags, Mask, Tokens


def select_tokens(
    loss: str | PolicyLossFunction, inputs: LossInputs, options: Mapping[str, Any] | None = None
) -> Flags:
    """Return the tokens that a loss of `SELECTIONS` treats differently, by a statistic over all tokens of `inputs`.

    A loss that gets its part of the result as `LossInputs.selected` has the same value however the batch is split.

    Args:
        loss: a name of `SELECTIONS`, or the function registered under it.
        inputs: tensors of the whole batch, `[T]` or `[B, L]`.
        options: keyword arguments of the loss.

    Raises:
        ConfigError: the name is unknown, an option has a value of the wrong kind, or the function returns something
            else than a flag for each token.
        OwnCodeError: the function is the user's, and raised an exception.
        UnknownOptionError: the loss has no such option.
    """
    POLICY_LOSSES.check(loss, options or {})
    choose = Configured.of(SELECTIONS, POLICY_LOSSES.name_of(loss), options or {})
    return check_result(choose.what, choose(inputs), [inputs.advantages], is_deep=False).bool()


def is_selective(loss: str | PolicyLossFunction | Configured) -> bool:
    """Return whether a loss treats the tokens that `select_tokens` chooses differently."""
    name = loss.name if isinstance(loss, Configured) else POLICY_LOSSES.name_of(loss)
    return name in SELECTIONS


def covariances(inputs: LossInputs) -> Tokens:
    """Return (A - mean A)(log pi - mean log pi) of each token, with means over the mask."""
    advantages, logprobs, mask = inputs.advantages, inputs.logprobs.detach(), inputs.mask
    return (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))


def lowest(x: Tensor, share: float, mask: Mask) -> Flags:
    """Return whether a token is among the tokens with the lowest `x`.

    `x`: values, of any shape.
    """
    flat = x.flatten()
    count = max(int(share * int(mask.bool().count_nonzero())), 1)
    chosen = flat.topk(min(count, len(flat)), largest=False).indices
    return torch.zeros_like(flat, dtype=torch.bool).index_fill(0, chosen, True).view(x.shape)
