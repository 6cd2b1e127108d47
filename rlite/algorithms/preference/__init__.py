"""Compute losses over pairs of a chosen and a rejected response, and over single responses.

Pairs: `dpo` and `reward_model`; single responses: `kto`. `preference_loss` calls any loss of the DPO family. To add a
loss:

    @register_preference_loss("squared_margin")
    def squared_margin(chosen, rejected, *, beta, target: float = 1.0):
        return (beta * (chosen - rejected) - target).square()
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlite.algorithms.preference.base import (
    PREFERENCE_LOSSES,
    PairLoss,
    PreferenceLossFunction,
    ResponseLoss,
    pair_metrics,
    register_preference_loss,
)
from rlite.algorithms.preference.dpo import aot_loss, desensitised_sums
from rlite.algorithms.preference.kto import kto_loss, kto_reference_point
from rlite.algorithms.preference.reward_model import reward_model_loss
from rlite.algorithms.registry import check_options, find, name_of
from rlite.algorithms.shapes import Pairs
from rlite.errors import ConfigError

Divergence = Literal["reverse_kl", "forward_kl", "js"]


def preference_loss(
    chosen_logps: Pairs,
    rejected_logps: Pairs,
    ref_chosen_logps: Pairs,
    ref_rejected_logps: Pairs,
    *,
    loss: str | PreferenceLossFunction | Mapping[str, float] = "sigmoid",
    beta: float = 0.1,
    divergence: Divergence = "reverse_kl",
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
        loss: a name of `PREFERENCE_LOSSES`, a function with the same signature, or a weighted sum of several,
            `{"sigmoid": 0.8, "bco": 0.2}` as in mixed preference optimisation (arXiv:2411.10442).
        beta: strength of the tie to the reference.
        divergence: divergence from the reference. The implicit reward is its derivative: log u for the reverse KL
            (DPO's),
            1 - 1/u for the forward KL, log 2u / (1 + u) for Jensen-Shannon (f-DPO, arXiv:2309.16240).
        chosen_lengths: tokens of the chosen response, `[P]`. With `rejected_lengths`, log ratios are divided by them.
        rejected_lengths: tokens of the rejected response, `[P]`.
        options: keyword arguments of the loss; of every loss if it is a sum.

    Returns:
        The loss, and the metrics `chosen_rewards` and `rejected_rewards` (the implicit rewards beta (logp - ref)),
        `accuracy` and `margin`. The metrics do not depend on the loss.

    Raises:
        ConfigError: the loss or the divergence is unknown, or only one of the two lengths is given.
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
    terms = [
        weight * check_preference_loss(part, options)(chosen, rejected, beta=beta, **options) for part, weight in parts
    ]
    return PairLoss(torch.stack(terms).sum(0), metrics)


def check_preference_loss(loss: str | PreferenceLossFunction, options: Mapping[str, Any]) -> PreferenceLossFunction:
    """Return the function of this name.

    Raises:
        ConfigError: the name is unknown, or an option has a value of the wrong kind.
        UnknownOptionError: the loss has no such option.
    """
    function = find(PREFERENCE_LOSSES, loss, "preference loss")
    what = f"preference loss {name_of(PREFERENCE_LOSSES, function)}"
    check_options(function, options, what, ("chosen", "rejected"), ("beta",))
    return function


def dpo_sigmoid(
    chosen_logps: Pairs,
    rejected_logps: Pairs,
    ref_chosen_logps: Pairs,
    ref_rejected_logps: Pairs,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """Return DPO's loss of every pair, by `preference_loss` with "sigmoid". DPO, arXiv:2305.18290, eq. 7.

    L = -log sigmoid(beta [(logp_c - ref_c) - (logp_r - ref_r)]).

    Args:
        chosen_logps: sum of log-probabilities over the chosen response, `[P]`.
        rejected_logps: sum over the rejected response, `[P]`.
        ref_chosen_logps: sum over the chosen response under the reference, `[P]`.
        ref_rejected_logps: sum over the rejected response under the reference, `[P]`.
        beta: strength of the tie to the reference.
        label_smoothing: label smoothing of conservative DPO.
    """
    sums = (chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    return preference_loss(*sums, beta=beta, options={"label_smoothing": label_smoothing})


def _implicit_reward(log_ratio: Tensor, divergence: Divergence) -> Tensor:
    """Return f'(u) up to a constant, u = exp(log ratio), for the f of the divergence.

    Raises:
        ConfigError: the divergence is unknown.
    """
    if divergence == "forward_kl":
        return 1 - torch.exp(-log_ratio)
    if divergence == "js":
        return math.log(2) + logsigmoid(log_ratio)
    if divergence != "reverse_kl":
        raise ConfigError(f"divergence {divergence!r}: expected one of {', '.join(get_args(Divergence))}")
    return log_ratio
