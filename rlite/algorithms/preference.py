"""Losses over pairs of a chosen and a rejected response; one value per pair, to be averaged over pairs.

A loss of the DPO family is a function `(chosen, rejected, *, beta, ...) -> loss` of the two log ratios to the
reference [pairs]; its other keyword parameters are options. `preference_loss` makes the log ratios and calls it. A
loss of your own:

    @register_preference_loss("squared_margin")
    def squared_margin(chosen, rejected, *, beta, target=1.0):
        return (beta * (chosen - rejected) - target).square()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlite.algorithms import dpo_losses
from rlite.algorithms.reduce import sequence_index, sequence_sums
from rlite.algorithms.registry import check_options, find, name_of, register
from rlite.errors import ConfigError

Divergence = Literal["reverse_kl", "forward_kl", "js"]
PreferenceLossFunction = Callable[..., Tensor]


class PairLoss(NamedTuple):
    """`loss` carries the gradient; `metrics` are detached, one value per pair."""

    loss: Float[Tensor, " pairs"]
    metrics: dict[str, Float[Tensor, " pairs"]]


def preference_loss(
    chosen_logps: Float[Tensor, " pairs"],
    rejected_logps: Float[Tensor, " pairs"],
    ref_chosen_logps: Float[Tensor, " pairs"],
    ref_rejected_logps: Float[Tensor, " pairs"],
    *,
    loss: str | PreferenceLossFunction | Mapping[str, float] = "sigmoid",
    beta: float = 0.1,
    divergence: Divergence = "reverse_kl",
    chosen_lengths: Shaped[Tensor, " pairs"] | None = None,
    rejected_lengths: Shaped[Tensor, " pairs"] | None = None,
    options: Mapping[str, Any] | None = None,
) -> PairLoss:
    """A loss of the DPO family; log-probabilities are sums over the completions.

    Args:
        loss: a name of `PREFERENCE_LOSSES`, a function like them, or a weighted sum of several, `{"sigmoid": 0.8,
            "bco": 0.2}` as in mixed preference optimisation (arXiv:2411.10442).
        beta: strength of the tie to the reference.
        divergence: from the reference, of which the implicit reward is the derivative: log u for the reverse KL, which
            is DPO's, 1 - 1/u for the forward KL, log 2u / (1 + u) for Jensen-Shannon (f-DPO, arXiv:2309.16240).
        chosen_lengths: with `rejected_lengths`, log ratios are divided by them: means over the tokens.
        options: of the loss; not for a sum.

    Metrics: the implicit rewards beta (logp - ref), accuracy and margin, whatever the loss.
    Raises: ConfigError for an unknown name, UnknownOptionError for an unknown option; `check_preference_loss` before.
    """
    chosen = chosen_logps - ref_chosen_logps.detach()
    rejected = rejected_logps - ref_rejected_logps.detach()
    metrics = _pair_metrics(beta * chosen, beta * rejected)
    if (chosen_lengths is None) != (rejected_lengths is None):
        raise ConfigError("length normalisation takes both chosen_lengths and rejected_lengths")
    if chosen_lengths is not None and rejected_lengths is not None:
        chosen, rejected = chosen / chosen_lengths.clamp(min=1), rejected / rejected_lengths.clamp(min=1)
    chosen, rejected = _implicit_reward(chosen, divergence), _implicit_reward(rejected, divergence)
    if isinstance(loss, Mapping):
        terms = [
            weight * check_preference_loss(name, options or {})(chosen, rejected, beta=beta)
            for name, weight in loss.items()
        ]
        return PairLoss(torch.stack(terms).sum(0), metrics)
    function = check_preference_loss(loss, options or {})
    return PairLoss(function(chosen, rejected, beta=beta, **(options or {})), metrics)


def check_preference_loss(loss: str | PreferenceLossFunction, options: Mapping[str, Any]) -> PreferenceLossFunction:
    """The function of that name. Raises: ConfigError for an unknown name, or an option's value of another kind than
    annotated; UnknownOptionError for an unknown option."""
    function = find(PREFERENCE_LOSSES, loss, "preference loss")
    check_options(function, options, f"preference loss {name_of(PREFERENCE_LOSSES, function)}", reserved=("beta",))
    return function


def register_preference_loss(name: str) -> Callable[[PreferenceLossFunction], PreferenceLossFunction]:
    """A decorator that makes a function a preference loss of that name. Raises: ConfigError if the name is taken."""
    return register(PREFERENCE_LOSSES, name)


def dpo_sigmoid(
    chosen_logps: Float[Tensor, " pairs"],
    rejected_logps: Float[Tensor, " pairs"],
    ref_chosen_logps: Float[Tensor, " pairs"],
    ref_rejected_logps: Float[Tensor, " pairs"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """L = -log sigmoid(beta [(logp_c - ref_c) - (logp_r - ref_r)]); `preference_loss` with "sigmoid".

    DPO, arXiv:2305.18290, eq. 7. `label_smoothing` is that of conservative DPO.
    """
    return preference_loss(
        chosen_logps,
        rejected_logps,
        ref_chosen_logps,
        ref_rejected_logps,
        beta=beta,
        options={"label_smoothing": label_smoothing},
    )


def aot_loss(
    chosen_logps: Float[Tensor, " pairs"],
    rejected_logps: Float[Tensor, " pairs"],
    ref_chosen_logps: Float[Tensor, " pairs"],
    ref_rejected_logps: Float[Tensor, " pairs"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    paired: bool = True,
) -> PairLoss:
    """DPO on sorted values: the distribution of the policy's margins is to dominate that of the reference's; unpaired,
    that of the chosen log ratios that of the rejected ones. AOT, arXiv:2406.05882.

    It compares quantiles over the pairs that it is given, so that a batch split into microbatches is another loss; for
    this reason it is not in `PREFERENCE_LOSSES`. The metrics are the pairs' own.
    """
    chosen, rejected = chosen_logps - ref_chosen_logps.detach(), rejected_logps - ref_rejected_logps.detach()
    if paired:
        upper = (chosen_logps - rejected_logps).sort(dim=0).values
        lower = (ref_chosen_logps - ref_rejected_logps).detach().sort(dim=0).values
    else:
        upper, lower = chosen.sort(dim=0).values, rejected.sort(dim=0).values
    loss = dpo_losses.dpo(upper, lower, beta=beta, label_smoothing=label_smoothing)
    return PairLoss(loss, _pair_metrics(beta * chosen, beta * rejected))


def desensitised_sums(
    logprobs: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    shared_lengths: Int[Tensor, " sequences"],
    *,
    tail_weight: float,
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
) -> Float[Tensor, " sequences"]:
    """Each sequence's sum of log-probabilities, in which the masked-in tokens after the first `shared_lengths`, the
    length of the shorter one of its pair, weigh `tail_weight`; 1 is DPO. LD-DPO, arXiv:2409.06411.
    """
    mask = mask.bool()
    index = sequence_index(mask, cu_seqlens)
    if cu_seqlens is None:
        position = mask.cumsum(-1)
    else:  # the number of action tokens up to here, less that before the sequence
        running = mask.cumsum(0)
        before = torch.cat([running.new_zeros(1), running])[torch.cat([cu_seqlens[:-1], cu_seqlens[-1:]]).long()]
        position = running - before[index]
    bounds = torch.cat([shared_lengths, shared_lengths.new_zeros(1)])[index]
    return sequence_sums(torch.where(position <= bounds, logprobs, tail_weight * logprobs), mask, cu_seqlens)


def reward_model_loss(
    chosen_scores: Float[Tensor, " pairs"],
    rejected_scores: Float[Tensor, " pairs"],
    *,
    margin: Float[Tensor, " pairs"] | None = None,
    center_coefficient: float = 0.0,
) -> PairLoss:
    """L = -log sigmoid(r_c - r_r - margin) + k (r_c + r_r)^2.

    Bradley-Terry (arXiv:2203.02155, eq. 1), margins of Llama 2 (arXiv:2307.09288, eq. 2), centring of arXiv:2312.09244.
    """
    difference = chosen_scores - rejected_scores
    loss = -logsigmoid(difference if margin is None else difference - margin)
    if center_coefficient:
        loss = loss + center_coefficient * (chosen_scores + rejected_scores).square()
    return PairLoss(loss, _pair_metrics(chosen_scores, rejected_scores))


class ResponseLoss(NamedTuple):
    """`loss` carries the gradient; `metrics` are detached, one value per response."""

    loss: Float[Tensor, " responses"]
    metrics: dict[str, Float[Tensor, " responses"]]


def kto_loss(
    logps: Float[Tensor, " responses"],
    ref_logps: Float[Tensor, " responses"],
    is_desirable: Shaped[Tensor, " responses"],
    *,
    kl: Float[Tensor, ""] | float = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> ResponseLoss:
    """L = w (1 - sigmoid(+-beta [logp - ref - kl])), + and w_d for a desirable response, - and w_u for the others.
    KTO, arXiv:2402.01306, on responses without pairs.

    `kl` is `kto_reference_point`; 0 is the unpaired form of APO-zero (arXiv:2408.06266). Metrics: the implicit rewards
    beta (logp - ref).
    """
    rewards = beta * (logps - ref_logps.detach())
    is_desirable = is_desirable.bool()
    shifted = rewards - beta * kl
    signed = torch.where(is_desirable, shifted, -shifted)
    loss = torch.sigmoid(-signed)
    loss = torch.where(is_desirable, desirable_weight * loss, undesirable_weight * loss)
    return ResponseLoss(loss, {"rewards": rewards.detach()})


@torch.no_grad()
def kto_reference_point(
    logps: Float[Tensor, " responses"], ref_logps: Float[Tensor, " responses"]
) -> Float[Tensor, ""]:
    """max(0, mean(logp - ref)) over mismatched prompts and responses: KTO's estimate of the KL, without a gradient.

    arXiv:2402.01306: answers to other prompts of the batch.
    """
    return (logps - ref_logps).mean().clamp(min=0)


def _implicit_reward(log_ratio: Tensor, divergence: Divergence) -> Tensor:
    """f'(u) up to a constant, u = exp(log ratio), for the f of the divergence."""
    if divergence == "forward_kl":
        return 1 - torch.exp(-log_ratio)
    if divergence == "js":
        return math.log(2) + logsigmoid(log_ratio)
    if divergence != "reverse_kl":
        raise ConfigError(f"divergence {divergence!r}: expected one of {', '.join(get_args(Divergence))}")
    return log_ratio


def _pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "chosen_rewards": chosen,
        "rejected_rewards": rejected,
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "margin": chosen - rejected,
    }


PREFERENCE_LOSSES: dict[str, PreferenceLossFunction] = {
    "apo_down": dpo_losses.apo_down,
    "apo_zero": dpo_losses.apo_zero,
    "bco": dpo_losses.bco,
    "discopop": dpo_losses.discopop,
    "exo": dpo_losses.exo,
    "hinge": dpo_losses.hinge,
    "ipo": dpo_losses.ipo,
    "nca": dpo_losses.nca,
    "robust": dpo_losses.robust_dpo,
    "sigmoid": dpo_losses.dpo,
    "sppo": dpo_losses.sppo,
}
