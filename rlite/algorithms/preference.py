"""Compute losses over pairs of a chosen and a rejected response, and over single responses.

A log ratio is log pi - log ref. `preference_loss` makes the log ratios of a pair, and applies another divergence or
length normalisation to them. In the losses of the DPO family, c and r are the two log ratios `[P]`, d = c - r and
b = beta. To add a loss:

    @register_preference_loss("squared_margin")
    def squared_margin(chosen, rejected, *, beta, target: float = 1.0):
        return (beta * (chosen - rejected) - target).square()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import logsigmoid, relu, sigmoid

from rlite.algorithms.reduce import Configured, check_result, one_of, sequence_index, sequence_sums
from rlite.algorithms.shapes import CuSeqlens, Mask, Pairs, Scalar, Sequences, Tokens
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
    """Return f'(u) up to a constant, u = exp(log ratio), for the f of the divergence."""
    one_of(PreferenceDivergence, divergence, f"divergence {divergence!r}")
    if divergence == "forward_kl":
        return 1 - torch.exp(-log_ratio)
    return math.log(2) + logsigmoid(log_ratio) if divergence == "js" else log_ratio


def pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return `chosen_rewards`, `rejected_rewards`, `accuracy` and `margin` of each pair.

    `accuracy` is 1 if the chosen reward is larger, and `margin` is the difference.

    `chosen`: reward of the chosen response, `[P]`. `rejected`: reward of the rejected response, `[P]`.
    """
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "chosen_rewards": chosen,
        "rejected_rewards": rejected,
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "margin": chosen - rejected,
    }


@register_preference_loss("sigmoid")
def dpo(chosen: Pairs, rejected: Pairs, *, beta: float, label_smoothing: float = 0.0, margin: float = 0.0) -> Pairs:
    """Return DPO's loss of every pair.

    L = -log sigmoid(b d - margin). DPO, arXiv:2305.18290, eq. 7.

    `label_smoothing`: e of conservative DPO, (1 - e) L(d) + e L(-d) (Mitchell 2023, "A note on DPO with noisy
    preferences").
    """
    logits = beta * (chosen - rejected) - margin
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


@register_preference_loss("robust")
def robust_dpo(chosen: Pairs, rejected: Pairs, *, beta: float, label_smoothing: float = 0.1) -> Pairs:
    """Return robust DPO's loss of every pair.

    L = [-(1 - e) log sigmoid(b d) + e log sigmoid(-b d)] / (1 - 2 e). Robust DPO, arXiv:2403.00409.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"label_smoothing={label_smoothing}: expected a share of flipped labels under one half")
    logits = beta * (chosen - rejected)
    loss = -(1 - label_smoothing) * logsigmoid(logits) + label_smoothing * logsigmoid(-logits)
    return loss / (1 - 2 * label_smoothing)


@register_preference_loss("hinge")
def hinge(chosen: Pairs, rejected: Pairs, *, beta: float) -> Pairs:
    """Return the hinge loss of every pair.

    L = max(0, 1 - b d). SLiC, arXiv:2305.10425; RSO, arXiv:2309.06657.
    """
    return relu(1 - beta * (chosen - rejected))


@register_preference_loss("ipo")
def ipo(chosen: Pairs, rejected: Pairs, *, beta: float) -> Pairs:
    """Return IPO's loss of every pair.

    L = (d - 1 / (2 b))^2. IPO, arXiv:2310.12036, eq. 17; implementations differ in dividing by the lengths.
    """
    return (chosen - rejected - 0.5 / beta).square()


@register_preference_loss("exo")
def exo(chosen: Pairs, rejected: Pairs, *, beta: float, label_smoothing: float = 1e-3) -> Pairs:
    """Return EXO's loss of every pair.

    L = KL(sigmoid(b d) || 1 - e): the reverse KL of the policy's preference from the labels'. EXO, arXiv:2402.00856.
    """
    if not 0 < label_smoothing < 1:
        raise ConfigError(f"label_smoothing={label_smoothing}: EXO compares with labels between 0 and 1")
    logits = beta * (chosen - rejected)
    prefers = sigmoid(logits) * (logsigmoid(logits) - math.log1p(-label_smoothing))
    return prefers + sigmoid(-logits) * (logsigmoid(-logits) - math.log(label_smoothing))


@register_preference_loss("nca")
def nca(chosen: Pairs, rejected: Pairs, *, beta: float) -> Pairs:
    """Return NCA's loss of every pair.

    L = -log sigmoid(b c) - [log sigmoid(-b c) + log sigmoid(-b r)] / 2. NCA, arXiv:2402.05369.
    """
    return -logsigmoid(beta * chosen) - 0.5 * (logsigmoid(-beta * chosen) + logsigmoid(-beta * rejected))


@register_preference_loss("bco")
def bco(chosen: Pairs, rejected: Pairs, *, beta: float, shift: float = 0.0) -> Pairs:
    """Return BCO's loss of every pair.

    L = -log sigmoid(b c - shift) - log sigmoid(shift - b r). BCO, arXiv:2404.04656.

    `shift`: offset of the rewards; in the paper their running mean.
    """
    return -logsigmoid(beta * chosen - shift) - logsigmoid(shift - beta * rejected)


@register_preference_loss("sppo")
def sppo(chosen: Pairs, rejected: Pairs, *, beta: float) -> Pairs:
    """Return SPPO's loss of every pair.

    L = (c - 1 / (2 b))^2 + (r + 1 / (2 b))^2. SPPO with hard labels, arXiv:2405.00675.
    """
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


@register_preference_loss("apo_zero")
def apo_zero(chosen: Pairs, rejected: Pairs, *, beta: float) -> Pairs:
    """Return APO-zero's loss of every pair.

    L = 1 - sigmoid(b c) + sigmoid(b r): chosen up, rejected down. APO-zero, arXiv:2408.06266.
    """
    return sigmoid(-beta * chosen) + sigmoid(beta * rejected)


@register_preference_loss("apo_down")
def apo_down(chosen: Pairs, rejected: Pairs, *, beta: float) -> Pairs:
    """Return APO-down's loss of every pair.

    L = sigmoid(b c) + 1 - sigmoid(b d): both down, rejected further.

    APO-down, arXiv:2408.06266, for a policy that is better than the chosen responses.
    """
    return sigmoid(beta * chosen) + sigmoid(-beta * (chosen - rejected))


@register_preference_loss("discopop")
def discopop(chosen: Pairs, rejected: Pairs, *, beta: float, tau: float = 0.05) -> Pairs:
    """Return DiscoPOP's loss of every pair.

    L = -(1 - m) log sigmoid(l) + m exp(-l), l = b d, m = sigmoid(l / tau). DiscoPOP, arXiv:2406.08414.
    """
    logits = beta * (chosen - rejected)
    blend = sigmoid(logits / tau)
    # where the blend rounds to 0 the exponential may be infinite, and 0 inf is nan
    exponential = torch.where(blend > 0, blend * torch.exp(-logits.clamp(min=-80.0)), 0.0)
    return -(1 - blend) * logsigmoid(logits) + exponential


def aot_loss(
    chosen_logps: Pairs,
    rejected_logps: Pairs,
    ref_chosen_logps: Pairs,
    ref_rejected_logps: Pairs,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    paired: bool = True,
) -> PairLoss:
    """Return DPO's loss on sorted values, so that one distribution comes to dominate another. AOT, arXiv:2406.05882.

    The loss compares quantiles over the pairs of one call. A batch split into microbatches would have another loss, so
    AOT is not in `PREFERENCE_LOSSES`. The metrics are computed per pair, without sorting.

    Args:
        chosen_logps: sum of log-probabilities over the chosen response, `[P]`.
        rejected_logps: sum over the rejected response, `[P]`.
        ref_chosen_logps: sum over the chosen response under the reference, `[P]`.
        ref_rejected_logps: sum over the rejected response under the reference, `[P]`.
        beta: strength of the regularisation towards the reference.
        label_smoothing: as in `dpo`.
        paired: compare the policy's margins with the reference's. Otherwise compare the chosen log ratios with the
            rejected log ratios.
    """
    chosen, rejected = chosen_logps - ref_chosen_logps.detach(), rejected_logps - ref_rejected_logps.detach()
    margins = chosen_logps - rejected_logps, (ref_chosen_logps - ref_rejected_logps).detach()
    upper, lower = margins if paired else (chosen, rejected)
    loss = dpo(upper.sort(dim=0).values, lower.sort(dim=0).values, beta=beta, label_smoothing=label_smoothing)
    return PairLoss(loss, pair_metrics(beta * chosen, beta * rejected))


def desensitised_sums(
    logprobs: Tokens,
    mask: Mask,
    shared_lengths: Int[Tensor, " sequences"],
    *,
    tail_weight: float,
    cu_seqlens: CuSeqlens | None = None,
) -> Sequences:
    """Return each sequence's sum of log-probabilities, with another weight for its tail. LD-DPO, arXiv:2409.06411.

    Args:
        logprobs: log-probability of each token, `[T]` or `[B, L]`.
        mask: tokens that count.
        shared_lengths: tokens in the mask with weight 1, the length of the shorter response of the pair, `[N]`.
        tail_weight: weight of the tokens after them; 1 is DPO.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
    """
    mask = mask.bool()
    index = sequence_index(mask, cu_seqlens)
    if cu_seqlens is None:
        position = mask.cumsum(-1)
    else:  # the number of action tokens up to here, less that before the sequence
        running = mask.cumsum(0)
        before = torch.cat([running.new_zeros(1), running])[cu_seqlens.long()]
        position = running - before[index]
    bounds = torch.cat([shared_lengths, shared_lengths.new_zeros(1)])[index]
    return sequence_sums(torch.where(position <= bounds, logprobs, tail_weight * logprobs), mask, cu_seqlens)


@register_preference_loss("simpo", of_probabilities=True)
def simpo(chosen: Pairs, rejected: Pairs, *, beta: float, gamma: float = 1.0, label_smoothing: float = 0.0) -> Pairs:
    """Return SimPO's loss of every pair.

    L = -log sigmoid(b c - b r - gamma). SimPO, arXiv:2405.14734, eq. 6.

    Args:
        chosen: mean log-probability of the chosen response's tokens, `[P]`, without a reference.
        rejected: mean log-probability of the rejected response's tokens, `[P]`.
        beta: factor of the mean log-probabilities.
        gamma: margin of the rewards; in the paper 0.3 to 1.6 times beta.
        label_smoothing: as in `dpo`.
    """
    return dpo(chosen, rejected, beta=beta, margin=gamma, label_smoothing=label_smoothing)


_SURE = -1e-6
"""largest mean log-probability; the odds of a certain response are infinite"""


@register_preference_loss("orpo", of_probabilities=True)
def orpo(chosen: Pairs, rejected: Pairs, *, beta: float) -> Pairs:
    """Return ORPO's odds-ratio loss of every pair.

    L = -b log sigmoid(log odds(c) - log odds(r)), log odds(x) = x - log(1 - exp x). ORPO, arXiv:2403.07691, eq. 7. The
    paper adds the negative log-likelihood of the chosen response (`actor.preference_loss.nll_weight=1`).

    Args:
        chosen: mean log-probability of the chosen response's tokens, `[P]`, without a reference.
        rejected: mean log-probability of the rejected response's tokens, `[P]`.
        beta: weight of the loss, lambda in the paper.
    """
    return -beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(logps: Pairs) -> Pairs:
    logps = logps.clamp(max=_SURE)
    return logps - torch.log(-torch.expm1(logps))


Responses = Float[Tensor, " responses"]


def kto_loss(
    logps: Responses,
    ref_logps: Responses,
    is_desirable: Shaped[Tensor, " responses"],
    *,
    kl: Scalar | float = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> ResponseLoss:
    """Return KTO's loss of every response (arXiv:2402.01306).

    L = w (1 - sigmoid(+-beta [logp - ref - kl])), + for a desirable response, - for the others.

    Args:
        logps: sum of log-probabilities over each response, `[R]`.
        ref_logps: sum of log-probabilities over each response under the reference, `[R]`.
        is_desirable: 1 for a desirable response, `[R]`.
        kl: `kto_reference_point`; 0 is the unpaired form of APO-zero (arXiv:2408.06266).
        beta: strength of the regularisation towards the reference.
        desirable_weight: w of a desirable response.
        undesirable_weight: w of an undesirable response.

    Returns:
        The loss, and the metric `rewards`, the implicit rewards beta (logp - ref).
    """
    rewards = beta * (logps - ref_logps.detach())
    is_desirable = is_desirable.bool()
    shifted = rewards - beta * kl
    loss = torch.sigmoid(torch.where(is_desirable, -shifted, shifted))
    loss = torch.where(is_desirable, desirable_weight * loss, undesirable_weight * loss)
    return ResponseLoss(loss, {"rewards": rewards.detach()})


@torch.no_grad()
def kto_reference_point(logps: Responses, ref_logps: Responses) -> Scalar:
    """Return max(0, mean(logp - ref)) over mismatched prompts and responses: KTO's estimate of the KL.

    arXiv:2402.01306 takes each prompt with the response to another prompt of the batch.
    """
    return (logps - ref_logps).mean().clamp(min=0)


def reward_model_loss(
    chosen_scores: Pairs, rejected_scores: Pairs, *, margin: Pairs | None = None, center_coefficient: float = 0.0
) -> PairLoss:
    """Return the reward model's loss of every pair.

    L = -log sigmoid(r_c - r_r - margin) + k (r_c + r_r)^2. Bradley-Terry, arXiv:2203.02155, eq. 1.

    Args:
        chosen_scores: r_c, `[P]`.
        rejected_scores: r_r, `[P]`.
        margin: margin of Llama 2 (arXiv:2307.09288, eq. 2), `[P]`.
        center_coefficient: k, which keeps scores near 0 (arXiv:2312.09244).
    """
    difference = chosen_scores - rejected_scores
    loss = -logsigmoid(difference if margin is None else difference - margin)
    if center_coefficient:
        loss = loss + center_coefficient * (chosen_scores + rejected_scores).square()
    return PairLoss(loss, pair_metrics(chosen_scores, rejected_scores))
