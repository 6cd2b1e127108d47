"""Compute losses of the DPO family from the log ratios of a chosen and a rejected response, one value per pair.

A log ratio is log pi - log ref. `preference_loss` makes the log ratios, and applies another divergence or length
normalisation to them. Below, c and r are the two log ratios, d = c - r and b = beta.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import logsigmoid, relu, sigmoid

from rlite.algorithms.preference.base import PairLoss, pair_metrics, register_preference_loss
from rlite.algorithms.reduce import sequence_index, sequence_sums
from rlite.algorithms.shapes import CuSeqlens, Mask, Pairs, Sequences, Tokens
from rlite.errors import ConfigError


@register_preference_loss("sigmoid")
def dpo(chosen: Pairs, rejected: Pairs, *, beta: float, label_smoothing: float = 0.0, margin: float = 0.0) -> Pairs:
    """Return DPO's loss of every pair.

    L = -log sigmoid(b d - margin). DPO, arXiv:2305.18290, eq. 7.

    Args:
        chosen: log ratio of the chosen response, `[P]`.
        rejected: log ratio of the rejected response, `[P]`.
        beta: strength of the regularisation towards the reference.
        label_smoothing: e of conservative DPO, (1 - e) L(d) + e L(-d) (Mitchell 2023, "A note on DPO with noisy
            preferences").
        margin: subtracted from b d.
    """
    logits = beta * (chosen - rejected) - margin
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


@register_preference_loss("robust")
def robust_dpo(chosen: Pairs, rejected: Pairs, *, beta: float, label_smoothing: float = 0.1) -> Pairs:
    """Return robust DPO's loss of every pair.

    L = [-(1 - e) log sigmoid(b d) + e log sigmoid(-b d)] / (1 - 2 e). Robust DPO, arXiv:2403.00409.

    Args:
        chosen: log ratio of the chosen response, `[P]`.
        rejected: log ratio of the rejected response, `[P]`.
        beta: strength of the regularisation towards the reference.
        label_smoothing: e, the share of flipped labels for which the loss is unbiased.

    Raises:
        ConfigError: `label_smoothing` is not in [0, 1/2).
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

    Args:
        chosen: log ratio of the chosen response, `[P]`.
        rejected: log ratio of the rejected response, `[P]`.
        beta: strength of the regularisation towards the reference.
    """
    return relu(1 - beta * (chosen - rejected))


@register_preference_loss("ipo")
def ipo(chosen: Pairs, rejected: Pairs, *, beta: float) -> Pairs:
    """Return IPO's loss of every pair.

    L = (d - 1 / (2 b))^2. IPO, arXiv:2310.12036, eq. 17; implementations differ in dividing by the lengths.

    Args:
        chosen: log ratio of the chosen response, `[P]`.
        rejected: log ratio of the rejected response, `[P]`.
        beta: strength of the regularisation towards the reference.
    """
    return (chosen - rejected - 0.5 / beta).square()


@register_preference_loss("exo")
def exo(chosen: Pairs, rejected: Pairs, *, beta: float, label_smoothing: float = 1e-3) -> Pairs:
    """Return EXO's loss of every pair.

    L = KL(sigmoid(b d) || 1 - e): the reverse KL of the policy's preference from the labels'. EXO, arXiv:2402.00856.

    Args:
        chosen: log ratio of the chosen response, `[P]`.
        rejected: log ratio of the rejected response, `[P]`.
        beta: strength of the regularisation towards the reference.
        label_smoothing: e, the share of flipped labels.

    Raises:
        ConfigError: `label_smoothing` is not in (0, 1).
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

    Args:
        chosen: log ratio of the chosen response, `[P]`.
        rejected: log ratio of the rejected response, `[P]`.
        beta: strength of the regularisation towards the reference.
    """
    return -logsigmoid(beta * chosen) - 0.5 * (logsigmoid(-beta * chosen) + logsigmoid(-beta * rejected))


@register_preference_loss("bco")
def bco(chosen: Pairs, rejected: Pairs, *, beta: float, shift: float = 0.0) -> Pairs:
    """Return BCO's loss of every pair.

    L = -log sigmoid(b c - shift) - log sigmoid(shift - b r). BCO, arXiv:2404.04656.

    Args:
        chosen: log ratio of the chosen response, `[P]`.
        rejected: log ratio of the rejected response, `[P]`.
        beta: strength of the regularisation towards the reference.
        shift: offset of the rewards; in the paper their running mean.
    """
    return -logsigmoid(beta * chosen - shift) - logsigmoid(shift - beta * rejected)


@register_preference_loss("sppo")
def sppo(chosen: Pairs, rejected: Pairs, *, beta: float) -> Pairs:
    """Return SPPO's loss of every pair.

    L = (c - 1 / (2 b))^2 + (r + 1 / (2 b))^2. SPPO with hard labels, arXiv:2405.00675.

    Args:
        chosen: log ratio of the chosen response, `[P]`.
        rejected: log ratio of the rejected response, `[P]`.
        beta: strength of the regularisation towards the reference.
    """
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


@register_preference_loss("apo_zero")
def apo_zero(chosen: Pairs, rejected: Pairs, *, beta: float) -> Pairs:
    """Return APO-zero's loss of every pair.

    L = 1 - sigmoid(b c) + sigmoid(b r): chosen up, rejected down. APO-zero, arXiv:2408.06266.

    Args:
        chosen: log ratio of the chosen response, `[P]`.
        rejected: log ratio of the rejected response, `[P]`.
        beta: strength of the regularisation towards the reference.
    """
    return sigmoid(-beta * chosen) + sigmoid(beta * rejected)


@register_preference_loss("apo_down")
def apo_down(chosen: Pairs, rejected: Pairs, *, beta: float) -> Pairs:
    """Return APO-down's loss of every pair.

    L = sigmoid(b c) + 1 - sigmoid(b d): both down, rejected further.

    APO-down, arXiv:2408.06266, for a policy that is better than the chosen responses.

    Args:
        chosen: log ratio of the chosen response, `[P]`.
        rejected: log ratio of the rejected response, `[P]`.
        beta: strength of the regularisation towards the reference.
    """
    return sigmoid(beta * chosen) + sigmoid(-beta * (chosen - rejected))


@register_preference_loss("discopop")
def discopop(chosen: Pairs, rejected: Pairs, *, beta: float, tau: float = 0.05) -> Pairs:
    """Return DiscoPOP's loss of every pair.

    L = -(1 - m) log sigmoid(l) + m exp(-l), l = b d, m = sigmoid(l / tau). DiscoPOP, arXiv:2406.08414.

    Args:
        chosen: log ratio of the chosen response, `[P]`.
        rejected: log ratio of the rejected response, `[P]`.
        beta: strength of the regularisation towards the reference.
        tau: temperature of the blend m.
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
    if paired:
        upper, lower = chosen_logps - rejected_logps, (ref_chosen_logps - ref_rejected_logps).detach()
    else:
        upper, lower = chosen, rejected
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
