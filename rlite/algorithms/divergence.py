"""Divergences of a student's distribution of the next token from a teacher's, for on-policy distillation.

s is the student's distribution, t the teacher's, and x are the student's logits / temperature:

    forward KL    sum_v t_v (log t_v - log s_v)
    reverse KL    sum_v s_v (log s_v - log t_v)
    JSD           b KL(t || m) + (1 - b) KL(s || m)    m = b t + (1 - b) s    (GKD, arXiv:2306.13649)

With w_v = s_v dD/ds_v and G = sum_v w_v, the gradient of each of them is dD/dx_v = w_v - s_v G. Each term is written so
that it is 0 bit by bit where s_v = t_v: a student that equals its teacher has no loss and no gradient, not even noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rlite.algorithms.logprobs import OnLogprobs, TokenLogprobs
from rlite.errors import ConfigError

LEAST = -1e4
"""stands for a logarithm of 0: its exponential is 0, and times 0 it is 0"""
Values = Float[Tensor, "*any"]


class TaughtLogprobs(TokenLogprobs):
    """Log-probabilities and entropies, with the divergence of the student from its teacher at every position."""

    divergence: Float[Tensor, " tokens"]

    @classmethod
    def of(cls, tokens: TokenLogprobs, divergence: Tensor, is_fixed: bool = False) -> TaughtLogprobs:
        """Return the values of `tokens` and their divergences.

        `tokens`: log-probabilities and entropies, `[T]`. `divergence`: divergences, `[T]`.
        """
        logprobs = tokens.logprobs.detach() if is_fixed else tokens.logprobs
        made = cls(logprobs, tokens.entropy, tokens.full_logprobs)
        made.divergence = divergence
        return made


class OnHidden(OnLogprobs):
    """A post_hook whose first argument are the last hidden states `[T, H]`, which the output embedding reads."""


class OnDivergence(OnLogprobs):
    """A loss_fn whose first argument is a `TaughtLogprobs`. The pack has the columns of a teacher."""

    divergence: Divergence


@dataclass(frozen=True)
class Divergence:
    """A divergence, and the tokens of the vocabulary that it tells apart."""

    beta: float = 1.0
    """0 is the forward KL, 1 the reverse KL, and a value between them the b of the JSD"""
    support: str = "full"
    """full: the whole vocabulary; student_topk, teacher_topk, union: the likeliest tokens of one model or of both, with
    one more token for the rest of the vocabulary"""
    k: int = 64
    """tokens of each model that are told apart, if the support is not full"""

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1 or self.k < 1:
            raise ConfigError(f"beta={self.beta}, k={self.k}: expected beta from 0 to 1, and k of at least 1")


class Terms(NamedTuple):
    """Terms of a divergence, elementwise."""

    values: Values
    """sum to the divergence"""
    weights: Values
    """w of the gradient, see above; they sum to G"""


def terms(log_s: Values, log_t: Values, beta: float) -> Terms:
    """Return the terms of a divergence.

    `log_t`: log-probabilities of the teacher, of the same shape.
    """
    log_s, log_t = log_s.clamp(min=LEAST), log_t.clamp(min=LEAST)
    gap = log_t - log_s
    if beta == 0:
        t = log_t.exp()
        return Terms(t * gap, -t)
    s = log_s.exp()
    if beta == 1:
        weights = s * -gap
        return Terms(weights, weights)
    # log m - log s = log(1 - b + b e^gap), and log m - log t: of the two, the one whose exponential does not overflow
    if_less = (beta * gap.clamp(max=0).expm1()).log1p()
    if_more = ((1 - beta) * (-gap.clamp(min=0)).expm1()).log1p()
    from_s = torch.where(gap <= 0, if_less, gap + if_more)
    from_t = torch.where(gap <= 0, if_less - gap, if_more)
    weights = (beta - 1) * s * from_s
    return Terms(weights - beta * log_t.exp() * from_t, weights)


def total_weight(weights: Float[Tensor, "*rows columns"], beta: float) -> Float[Tensor, "*rows"]:
    """Return G, the sum of the weights of all columns. That of the forward KL is -1, without the noise of a sum."""
    return torch.full_like(weights[..., 0], -1) if beta == 0 else weights.sum(-1)


class Bucketed(NamedTuple):
    """A divergence over some tokens and one bucket for the rest of the vocabulary."""

    values: Float[Tensor, " rows"]
    """the divergence"""
    slopes: Float[Tensor, "rows k"]
    """gradient with respect to the student's logits / temperature of these tokens"""
    rest: Float[Tensor, " rows"]
    """factor of s_v in the gradient of every other token"""


def bucketed(log_s: Float[Tensor, "rows k"], log_t: Float[Tensor, "rows k"], beta: float) -> Bucketed:
    """Return the divergence over the given tokens and one bucket for the rest.

    `log_s`: log-probabilities of the student, `[rows, k]`; -inf is no token.
    """
    log_s, log_t = (torch.cat([x, _log_rest(x)], dim=-1).clamp(min=LEAST) for x in (log_s, log_t))
    values, weights = terms(log_s, log_t, beta)
    total, s = total_weight(weights, beta), log_s.exp()
    return Bucketed(values.sum(-1), (weights - s * total[:, None])[:, :-1], weights[:, -1] / s[:, -1] - total)


def _log_rest(logprobs: Tensor) -> Tensor:
    """Return the logarithm of the probability that is left, `[rows, 1]`; rounding may have left less than nothing."""
    left = 1 - logprobs.exp().sum(-1, keepdim=True)
    return left.clamp(min=torch.finfo(left.dtype).eps).log()
