"""Compute the losses of critics and of supervised fine-tuning, and make functions of log-probabilities losses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

import torch

from rlite.algorithms.logprobs import OnLogprobs, TokenLogprobs, check_temperature
from rlite.algorithms.reduce import TokenLoss, finite_gradient
from rlite.algorithms.shapes import Tokens


def value_loss(
    values: Tokens, returns: Tokens, old_values: Tokens | None = None, *, clip: float | None = None
) -> TokenLoss:
    """Return the critic's loss of every token.

    L = max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2; without `clip`, (v - R)^2 / 2.

    The clipped value loss of the PPO implementation in OpenAI baselines (ppo2).

    Args:
        values: v with its gradient, `[T]` or `[B, L]`.
        returns: R, constants.
        old_values: v at the rollout, constants.
        clip: c, how far v may move from v_old. None is off.

    Returns:
        The loss, and the metric `clip_fraction`.
    """
    returns = returns.detach()
    values = finite_gradient(values, returns, old_values)
    unclipped = clipped = (values - returns).square()
    if clip is not None and old_values is not None:
        old_values = old_values.detach()
        near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
        clipped = (near - returns).square()
    is_clipped = (clipped > unclipped).to(unclipped.dtype)
    return TokenLoss(0.5 * torch.maximum(unclipped, clipped), {"clip_fraction": is_clipped})


def cross_entropy(logprobs: Tokens) -> TokenLoss:
    """Return the cross entropy of every token.

    L = -log p(token), from the log-probabilities of `gather_logprobs`.
    """
    return TokenLoss(-logprobs, {})


class _Function(OnLogprobs):
    def __init__(self, function: Callable[..., Any], temperature: float) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.temperature = check_temperature(temperature)

    def __call__(self, tokens: TokenLogprobs, data: dict[str, Any]) -> Any:
        return self.function(tokens, data)


@overload
def on_logprobs(function: Callable[..., Any], *, temperature: float = 1.0) -> OnLogprobs: ...
@overload
def on_logprobs(*, temperature: float = 1.0) -> Callable[[Callable[..., Any]], OnLogprobs]: ...
def on_logprobs(function: Callable[..., Any] | None = None, *, temperature: float = 1.0) -> Any:
    """Return a loss_fn or post_hook that needs no logits, made of `function(tokens: TokenLogprobs, data)`.

        @on_logprobs
        def surprise(tokens, data):
            return masked_mean(-tokens.logprobs, next_token(data["loss_mask"], data["cu_seqlens"]))

        engine.train_batch(batch, surprise, num_tokens)

    Other forms are `@on_logprobs(temperature=0.7)` and `on_logprobs(partial(function, ...), temperature=t)`.

    Args:
        function: the function; None returns a decorator.
        temperature: divisor of the logits.
    """
    if function is None:
        return functools.partial(on_logprobs, temperature=temperature)
    return _Function(function, temperature)
