"""Compute policy losses: one file per loss, named after it, and one function that calls any of them.

A policy loss is a function of one `LossInputs`. Its keyword parameters are its options. To add a loss:

    @register_policy_loss("squared")
    def squared(inputs: LossInputs, *, strength: float = 1.0) -> TokenLoss:
        penalty = (inputs.logprobs - inputs.old_logprobs).square()
        return TokenLoss(strength * penalty - inputs.advantages * inputs.logprobs, metrics={})
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlite.algorithms.policy_losses.base import (
    POLICY_LOSSES,
    SELECTIONS,
    LossInputs,
    PolicyLossFunction,
    WeightedTokenLoss,
    register_policy_loss,
)
from rlite.algorithms.policy_losses.cispo import cispo
from rlite.algorithms.policy_losses.clip_cov import clip_cov
from rlite.algorithms.policy_losses.decoupled_ppo import decoupled_ppo
from rlite.algorithms.policy_losses.dppo import dppo
from rlite.algorithms.policy_losses.dro import dro
from rlite.algorithms.policy_losses.gmpo import gmpo
from rlite.algorithms.policy_losses.gspo import gspo
from rlite.algorithms.policy_losses.kl_cov import kl_cov
from rlite.algorithms.policy_losses.m2po import m2po, second_moment_mask
from rlite.algorithms.policy_losses.ppo_clip import clipped_surrogate, ppo_clip
from rlite.algorithms.policy_losses.reinforce import reinforce
from rlite.algorithms.policy_losses.sapo import sapo
from rlite.algorithms.policy_losses.vespo import vespo
from rlite.algorithms.reduce import TokenLoss
from rlite.algorithms.registry import check_options, find, name_of
from rlite.algorithms.shapes import Flags


def policy_loss(
    loss: str | PolicyLossFunction, inputs: LossInputs, options: Mapping[str, Any] | None = None
) -> TokenLoss:
    """Return the loss of every token.

    `inputs.weights` multiply the loss, unless the loss function has applied them itself.

    Args:
        loss: a name of `POLICY_LOSSES`, or a function `(inputs, *, ...) -> TokenLoss`.
        inputs: per-token tensors, `[T]` or `[B, L]`.
        options: keyword arguments of the loss.

    Raises:
        ConfigError: the name is unknown, an option has a value of the wrong kind, or `inputs` lacks a tensor that the
            loss needs.
        UnknownOptionError: the loss has no such option.
    """
    function = check_policy_loss(loss, options or {})
    token = function(inputs, **(options or {}))
    return token if isinstance(token, WeightedTokenLoss) else inputs.weighted(*token)


def select_tokens(
    loss: str | PolicyLossFunction, inputs: LossInputs, options: Mapping[str, Any] | None = None
) -> Flags:
    """Return the tokens that a loss of `SELECTIONS` treats apart, chosen by a statistic over all tokens of `inputs`.

    A loss that gets its part of the result as `LossInputs.selected` has the same value however the batch is split.

    Args:
        loss: a name of `SELECTIONS`, or the function registered under it.
        inputs: tensors of the whole batch, `[T]` or `[B, L]`.
        options: keyword arguments of the loss.

    Raises:
        ConfigError: the name is unknown, or an option has a value of the wrong kind.
        UnknownOptionError: the loss has no such option.
    """
    function = check_policy_loss(loss, options or {})
    return SELECTIONS[name_of(POLICY_LOSSES, function)](inputs, **(options or {}))


def is_selective(loss: str | PolicyLossFunction) -> bool:
    """Return whether a loss treats tokens apart that `select_tokens` chooses."""
    return name_of(POLICY_LOSSES, find(POLICY_LOSSES, loss, "policy loss")) in SELECTIONS


def check_policy_loss(loss: str | PolicyLossFunction, options: Mapping[str, Any]) -> PolicyLossFunction:
    """Return the function of this name.

    Raises:
        ConfigError: the name is unknown, the function does not take one `LossInputs`, or an option has a value of the
            wrong kind.
        UnknownOptionError: the loss has no such option.
    """
    function = find(POLICY_LOSSES, loss, "policy loss")
    check_options(function, options, f"policy loss {name_of(POLICY_LOSSES, function)}", given=("inputs",))
    return function
