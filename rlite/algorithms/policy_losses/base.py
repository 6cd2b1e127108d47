"""Define the inputs of a policy loss, the table in which every loss registers itself, and calls of its losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlite.algorithms.reduce import Configured, TokenLoss, check_result, found, sequence_log_ratio
from rlite.algorithms.shapes import CuSeqlens, Flags, Mask, Tokens
from rlite.errors import ConfigError
from rlite.registry import Table

MAX_LOG_RATIO = 20.0
"""ratios are held between exp(-20) and exp(20); beyond them there is no gradient"""


class WeightedTokenLoss(TokenLoss):
    """A token loss that already contains `LossInputs.weights`."""


@dataclass(frozen=True)
class LossInputs:
    """The tensors that a policy loss reads, one value per token: packed `[T]` with `cu_seqlens`, or padded `[B, L]`.

    Only `logprobs` carries a gradient. The other tensors are constants and are detached here. Values outside the mask
    become 0: a NaN there would reach the gradient as 0 * NaN.
    """

    logprobs: Tokens
    """log-probability of the token under the policy that is trained"""
    old_logprobs: Tokens
    """log-probability before the updates on this rollout batch, the centre of the trust region"""
    advantages: Tokens
    """advantage of the token"""
    mask: Mask
    """1 for the tokens that count"""
    behaviour_logprobs: Tokens | None = None
    """log-probability under the policy that sampled the token"""
    weights: Tokens | None = None
    """importance weights of the old policy over the behaviour policy; every loss is multiplied by them, or includes
    them in a way of its own"""
    cu_seqlens: CuSeqlens | None = None
    """boundaries of the sequences of a pack, `[N + 1]`; None for padded tensors"""
    selected: Flags | None = None
    """the tokens that `select_tokens` chose over the whole batch, of which these tensors are a part"""

    def __post_init__(self) -> None:
        mask = self.mask.bool()
        for name in ("logprobs", "old_logprobs", "advantages", "behaviour_logprobs", "weights"):
            if (value := self.__dict__[name]) is not None:
                value = value if name == "logprobs" else value.detach()
                object.__setattr__(self, name, torch.where(mask, value, 0.0))

    def log_ratio(self, limit: float = MAX_LOG_RATIO) -> Tokens:
        """Return log(pi / pi_old) with its gradient, clamped to [-limit, limit]."""
        return (self.logprobs - self.old_logprobs).clamp(-limit, limit)

    def sequence_mean(self, x: Tokens) -> Tokens:
        """Return the mean of `x` over each sequence's tokens in the mask, at each of these tokens."""
        return sequence_log_ratio(x, self.mask, self.cu_seqlens)

    def behaviour(self, loss: str) -> Tokens:
        """Return `behaviour_logprobs`.

        Args:
            loss: name of the loss that needs them, for the error message.

        Raises:
            ConfigError: the tensor is missing.
        """
        if self.behaviour_logprobs is None:
            raise ConfigError(f"policy loss {loss} needs behaviour_logprobs, which LossInputs does not have here")
        return self.behaviour_logprobs

    def weighted(self, loss: Tokens, metrics: dict[str, Tokens]) -> WeightedTokenLoss:
        """Return the loss multiplied by the importance weights, if there are any.

        Args:
            loss: loss of each token, `[T]` or `[B, L]`.
            metrics: metrics of each token, by name.
        """
        return WeightedTokenLoss(loss if self.weights is None else loss * self.weights, metrics)


PolicyLossFunction = Callable[..., TokenLoss]
Selection = Callable[..., Flags]

POLICY_LOSSES: Table[PolicyLossFunction] = Table("policy loss", given=("inputs",))
"""policy losses by name"""
SELECTIONS: Table[Selection] = Table("selection of tokens", given=("inputs",))
"""by the name of a loss that treats a few tokens of the batch differently: the function that chooses these tokens"""


def register_policy_loss(
    name: str, *, select: Selection | None = None
) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Register a function as the policy loss of this name.

    A policy loss is a function `(inputs: LossInputs, *, ...) -> TokenLoss`. Its keyword parameters are its options. A
    value is checked against the parameter's annotation.

    Args:
        name: the value of `actor.policy_loss.name`.
        select: for a loss that treats a few tokens of the whole batch differently: `(inputs, **options) -> Bool`. It is
            called with the whole batch and the loss's options. Each part of the batch then has its share of the result
            as `LossInputs.selected`.

    Returns:
        A decorator, which returns the function unchanged.

    Raises:
        ConfigError: the name is taken by another function.
    """

    def enter(function: PolicyLossFunction) -> PolicyLossFunction:
        POLICY_LOSSES.register(name)(function)
        if select is not None:
            SELECTIONS[name] = select
        return function

    return enter


def policy_loss(
    loss: str | PolicyLossFunction | Configured, inputs: LossInputs, options: Mapping[str, Any] | None = None
) -> TokenLoss:
    """Return the loss of every token.

    `inputs.weights` multiply the loss, unless the loss function has applied them itself.

    Args:
        loss: a name of `POLICY_LOSSES`, a function `(inputs, *, ...) -> TokenLoss`, or either with its options.
        inputs: per-token tensors, `[T]` or `[B, L]`.
        options: keyword arguments of the loss.

    Raises:
        ConfigError: the name is unknown, an option has a value of the wrong kind, `inputs` lacks a tensor that the
            loss needs, or the loss returns something else than a TokenLoss of the shape of the inputs. At the first
            call of a loss: it has no gradient, or it is not finite although the inputs are.
        OwnCodeError: the loss is the user's, and raised an exception.
        UnknownOptionError: the loss has no such option.
    """
    configured = Configured.of(POLICY_LOSSES, loss, options or {})
    what, token = configured.what, configured(inputs)
    if not (isinstance(token, tuple) and len(token) == 2 and isinstance(token[1], Mapping)):
        raise ConfigError(f"{what} returned {found(token)}; expected rlite.algorithms.TokenLoss(loss, metrics)")
    check_result(what, token[0], [inputs.logprobs, inputs.old_logprobs, inputs.advantages], inputs.mask)
    for name, value in token[1].items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.shape not in (inputs.logprobs.shape, ()):
            said = f"{what} returned {found(value)} as the metric {name!r}"
            raise ConfigError(f"{said}; expected the loss's shape, and a text as name")
    return token if isinstance(token, WeightedTokenLoss) else inputs.weighted(*token)


def ratio_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """Return `approx_kl`, k1 of the old policy against the new policy, and `ratio`, of each token."""
    log_ratio = log_ratio.detach()
    return {"approx_kl": -log_ratio, "ratio": log_ratio.exp()}


def choose(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """Return `yes` or `no` for each token, in the dtype of `like`. torch.where alone would give float32.

    `condition`: choice of each token, of any shape. `like`: tensor whose dtype the result has, of the same shape.
    """
    return torch.where(condition, torch.full_like(like.detach(), yes), no)
