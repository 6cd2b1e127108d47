"""Define the results of preference losses, the table of the DPO family, and the call of its losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlite.algorithms.reduce import Configured, check_result
from rlite.algorithms.shapes import Pairs
from rlite.errors import ConfigError
from rlite.registry import Table
from rlite.types import PreferenceDivergence


class PairLoss(NamedTuple):
    """The loss of every pair, to be averaged over pairs."""

    loss: Pairs
    """carries the gradient"""
    metrics: dict[str, Pairs]
    """detached, one value per pair"""


class ResponseLoss(NamedTuple):
    """The loss of every response."""

    loss: Float[Tensor, " responses"]
    """carries the gradient"""
    metrics: dict[str, Float[Tensor, " responses"]]
    """detached, one value per response"""


PreferenceLossFunction = Callable[..., Tensor]
PREFERENCE_LOSSES: Table[PreferenceLossFunction] = Table(
    "preference loss", given=("chosen", "rejected"), reserved=("beta",)
)
"""losses of the DPO family by name"""
OF_PROBABILITIES: set[str] = set()
"""losses of the responses' mean log-probabilities, which have no meaning for log ratios to a reference"""


def register_preference_loss(
    name: str, of_probabilities: bool = False
) -> Callable[[PreferenceLossFunction], PreferenceLossFunction]:
    """Return a decorator that registers a function as the preference loss of this name.

    A preference loss is a function `(chosen, rejected, *, beta, ...) -> loss` of the two log ratios to the reference
    `[P]`. Its other keyword parameters are its options. If the name is taken, the decorator raises ConfigError.

    Args:
        name: name of the loss.
        of_probabilities: the loss takes mean log-probabilities per token `[P]` instead of log ratios. The trainer then
            asks for `reference_free` and `length_normalised`.
    """
    if of_probabilities:
        OF_PROBABILITIES.add(name)
    return PREFERENCE_LOSSES.register(name)


def preference_loss(
    chosen_logps: Pairs,
    rejected_logps: Pairs,
    ref_chosen_logps: Pairs,
    ref_rejected_logps: Pairs,
    *,
    loss: str | PreferenceLossFunction | Configured | Mapping[str, float] = "sigmoid",
    beta: float = 0.1,
    divergence: PreferenceDivergence = "reverse_kl",
    chosen_lengths: Shaped[Tensor, " pairs"] | None = None,
    rejected_lengths: Shaped[Tensor, " pairs"] | None = None,
    options: Mapping[str, Any] | None = None,
) -> PairLoss:
    """Return a loss of the DPO family for every pair.

    Args:
        chosen_logps: sum of log-probabilities over the chosen response, `[P]`.
        rejected_logps: sum over the rejected response, `[P]`.
        ref_chosen_logps: sum over the chosen response under the reference, `[P]`.
        ref_rejected_logps: sum over the rejected response under the reference, `[P]`.
        loss: a name of `PREFERENCE_LOSSES`, a function with the same signature, either with its options, or a weighted
            sum of several, `{"sigmoid": 0.8, "bco": 0.2}` as in mixed preference optimisation (arXiv:2411.10442).
        beta: strength of the regularisation towards the reference.
        divergence: divergence from the reference. The implicit reward is its derivative: log u for the reverse KL
            (DPO's), 1 - 1/u for the forward KL, log 2u / (1 + u) for Jensen-Shannon (f-DPO, arXiv:2309.16240).
        chosen_lengths: tokens of the chosen response, `[P]`. With `rejected_lengths`, log ratios are divided by them.
        rejected_lengths: tokens of the rejected response, `[P]`.
        options: keyword arguments of the loss; of every loss if it is a sum.

    Returns:
        The loss, and the metrics `chosen_rewards` and `rejected_rewards` (the implicit rewards beta (logp - ref)),
        `accuracy` and `margin`. The metrics do not depend on the loss.

    Raises:
        ConfigError: the loss or the divergence is unknown, only one of the two lengths is given, or the loss returns
            something else than one value for each pair. At the first call of a loss: it has no gradient, or it is not
            finite although the log ratios are.
        OwnCodeError: the loss is the user's, and raised an exception.
        UnknownOptionError: the loss has no such option.
    """
    chosen = chosen_logps - ref_chosen_logps.detach()
    rejected = rejected_logps - ref_rejected_logps.detach()
    metrics = pair_metrics(beta * chosen, beta * rejected)
    if (chosen_lengths is None) != (rejected_lengths is None):
        raise ConfigError("length normalisation takes both chosen_lengths and rejected_lengths")
    if chosen_lengths is not None and rejected_lengths is not None:
        chosen, rejected = chosen / chosen_lengths.clamp(min=1), rejected / rejected_lengths.clamp(min=1)
    chosen, rejected = _implicit_reward(chosen, divergence), _implicit_reward(rejected, divergence)
    options = options or {}
    parts = loss.items() if isinstance(loss, Mapping) else [(loss, 1.0)]
    terms = []
    for part, weight in parts:
        configured = Configured.of(PREFERENCE_LOSSES, part, options)
        values = configured(chosen.clone(), rejected.clone(), beta=beta)
        terms.append(weight * check_result(configured.what, values, [chosen, rejected]))
    return PairLoss(torch.stack(terms).sum(0), metrics)


def _implicit_reward(log_ratio: Tensor, divergence: PreferenceDivergence) -> Tensor:
    """Return f'(u) up to a constant, u = exp(log ratio), for the f of the divergence.

    Raises:
        ConfigError: the divergence is unknown.
    """
    if divergence == "forward_kl":
        return 1 - torch.exp(-log_ratio)
    if divergence == "js":
        return math.log(2) + logsigmoid(log_ratio)
    if divergence != "reverse_kl":
        raise ConfigError(f"divergence {divergence!r}: expected one of {', '.join(get_args(PreferenceDivergence))}")
    return log_ratio


def pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return `chosen_rewards`, `rejected_rewards`, `accuracy` and `margin` of each pair.

    `accuracy` is 1 if the chosen reward is larger, and `margin` is the difference.

    Args:
        chosen: reward of the chosen response, `[P]`.
        rejected: reward of the rejected response, `[P]`.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "chosen_rewards": chosen,
        "rejected_rewards": rejected,
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "margin": chosen - rejected,
    }
