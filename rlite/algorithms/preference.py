"""Losses over pairs of a chosen and a rejected response; one value per pair, to be averaged over pairs."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid


class PairLoss(NamedTuple):
    """`loss` carries the gradient; `metrics` are detached, one value per pair."""

    loss: Float[Tensor, " pairs"]
    metrics: dict[str, Float[Tensor, " pairs"]]


def dpo_sigmoid(
    chosen_logps: Float[Tensor, " pairs"],
    rejected_logps: Float[Tensor, " pairs"],
    ref_chosen_logps: Float[Tensor, " pairs"],
    ref_rejected_logps: Float[Tensor, " pairs"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """L = -log sigmoid(beta [(logp_c - ref_c) - (logp_r - ref_r)]); log-probabilities are sums over the completions.

    DPO, arXiv:2305.18290, eq. 7. `label_smoothing` = e is conservative DPO: (1 - e) L(d) + e L(-d) (Mitchell 2023,
    "A note on DPO with noisy preferences"). Metrics: the implicit rewards beta (logp - ref), accuracy and margin.
    """
    chosen = beta * (chosen_logps - ref_chosen_logps.detach())
    rejected = beta * (rejected_logps - ref_rejected_logps.detach())
    margin = chosen - rejected
    loss = -logsigmoid(margin)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * logsigmoid(-margin)
    return PairLoss(loss, _pair_metrics(chosen, rejected))


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


def _pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "chosen_rewards": chosen,
        "rejected_rewards": rejected,
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "margin": chosen - rejected,
    }
