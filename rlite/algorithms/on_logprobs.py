"""Declare losses that read log-probabilities and entropies, so that no rank has to hold the logits."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, overload

from jaxtyping import Bool, Float
from torch import Tensor

from rlite.algorithms.logprobs import check_temperature


class _Pair(NamedTuple):
    logprobs: Float[Tensor, " tokens"]
    """log p(next token) under softmax(logits / temperature); without a meaning at a sequence's last position. If the
    pack has kept ids of the token, p is normalised over them"""
    entropy: Float[Tensor, " tokens"]
    """entropy of softmax(logits / temperature) over the vocabulary, in nats"""


class TokenLogprobs(_Pair):
    """The policy's log-probability and entropy at every position of a pack, for the token that follows."""

    _full: Tensor | None = None

    def __new__(cls, logprobs: Tensor, entropy: Tensor, full_logprobs: Tensor | None = None) -> Self:
        """Return the pair (logprobs, entropy), with `full_logprobs` as an attribute.

        Args:
            logprobs: log-probabilities, `[T]`.
            entropy: entropies, `[T]`.
            full_logprobs: log-probabilities in the whole vocabulary, `[T]`; None if they are the same.
        """
        self = super().__new__(cls, logprobs, entropy)
        self._full = full_logprobs
        return self

    @property
    def full_logprobs(self) -> Float[Tensor, " tokens"]:
        """Return log p(next token) in the whole vocabulary, `[T]`, as a KL to another policy needs it."""
        return self.logprobs if self._full is None else self._full


class OnLogprobs(ABC):
    """A loss_fn or post_hook whose first argument is a `TokenLogprobs` instead of logits `[T, V]`.

    The engine never holds the logits of a whole pack. It computes log-probabilities in blocks of the vocabulary,
    forward and backward. Subclass it, or decorate a function with `on_logprobs`.
    """

    temperature: float = 1.0
    """divisor of the logits"""

    @abstractmethod
    def __call__(self, tokens: TokenLogprobs, data: dict[str, Any]) -> Any:
        """Return the result of a loss_fn or post_hook.

        Args:
            tokens: log-probabilities and entropies, `[T]`.
            data: the pack's keys.
        """

    def positions(self, data: Mapping[str, Any]) -> Bool[Tensor, " tokens"] | None:
        """Return the positions that the loss reads; None for all positions.

        At other positions values may be 0, which saves work.

        Args:
            data: the pack's keys.
        """
        return None


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
