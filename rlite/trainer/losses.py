"""Compute the trainers' losses on packs: loss functions of `train_batch`, and post_hooks of `forward`.

`data` holds a pack's keys: per-token tensors `[T]`, per-row tensors `[n]`, and `cu_seqlens` `[n + 1]`. A token's value
stands at the token. A loss reads it with `next_token` at the position that predicts the token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlite import algorithms
from rlite.algorithms import Mean, PairLoss, TokenLogprobs
from rlite.algorithms.reduce import Configured
from rlite.trainer.rl.objective import OnCounted, TokenMean, predicts_counted
from rlite.trainer.supervised_options import PreferenceLossOptions


@dataclass(frozen=True, kw_only=True)
class SftLoss(TokenMean, OnCounted):
    """The cross entropy of the tokens in `loss_mask`."""

    reported: ClassVar[tuple[str, ...]] = ()

    def __call__(self, tokens: TokenLogprobs, data: Mapping[str, Any]) -> Tensor:
        """Return the scalar loss of a pack.

        `tokens`: log-probabilities at the positions that predict the tokens, `[T]`.
        """
        return self._mean(-tokens.logprobs, predicts_counted(data), data)


@dataclass(frozen=True, kw_only=True)
class ValueLoss(TokenMean):
    """The clipped value loss on a pack. `data` holds `returns`, `values` and `loss_mask`, each `[T]`."""

    clip: float = 0.5

    def __call__(self, values: Tensor, data: Mapping[str, Any]) -> tuple[Tensor, dict[str, Mean]]:
        """Return the scalar loss of a pack, and its metrics.

        `values`: the critic's values at the positions that predict the tokens, `[T]`.
        """
        mask = predicts_counted(data)
        returns, old = (algorithms.next_token(data[key], data["cu_seqlens"]) for key in ("returns", "values"))
        loss, metrics = algorithms.value_loss(values, returns, old, clip=self.clip)
        report = {**metrics, "value": old, "return": returns}
        return self._mean(loss, mask, data), {key: Mean.of(value, mask) for key, value in report.items()}


class _PairMean:
    """A loss that averages over pairs.

    `is_chosen` [n] marks each pair's chosen row, which precedes the rejected row.
    """

    reported: ClassVar[tuple[str, ...]] = ("accuracy", "margin", "chosen_rewards", "rejected_rewards")

    def weight(self, data: Mapping[str, Any]) -> Tensor:
        """Return the number of pairs in a pack, the weight of its mean."""
        return data["is_chosen"].sum()

    def _mean(self, pairs: PairLoss) -> tuple[Tensor, dict[str, Tensor]]:
        return pairs.loss.mean(), {key: value.mean() for key, value in pairs.metrics.items()}


@dataclass(frozen=True, kw_only=True)
class DpoLoss(_PairMean, OnCounted):
    """A loss of the DPO family.

    `data` holds `loss_mask` [T], `is_chosen` [n] and, unless the loss is `reference_free`, `ref_logprobs` [T].
    """

    preference_loss: PreferenceLossOptions = field(default_factory=PreferenceLossOptions)
    beta: float = 0.1
    configured: Configured = field(init=False, repr=False, compare=False)
    """the function that `preference_loss.name` names, with its options"""

    def __post_init__(self) -> None:
        # a worker may not know the name: it is looked up here, and the function travels
        chosen = self.preference_loss
        object.__setattr__(self, "configured", Configured.of(algorithms.PREFERENCE_LOSSES, chosen.name, chosen.options))

    def __call__(self, tokens: TokenLogprobs, data: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar loss of a pack, and its metrics."""
        options = self.preference_loss
        cu_seqlens, mask, is_chosen = data["cu_seqlens"], predicts_counted(data), data["is_chosen"].bool()
        lengths = algorithms.sequence_sums(torch.ones_like(tokens.logprobs), mask, cu_seqlens).long()
        shared = torch.empty_like(lengths)
        shared[is_chosen] = shared[~is_chosen] = torch.minimum(lengths[is_chosen], lengths[~is_chosen])

        def sums(logprobs: Tensor) -> Tensor:
            weight = options.tail_weight
            return algorithms.desensitised_sums(logprobs, mask, shared, tail_weight=weight, cu_seqlens=cu_seqlens)

        ours, divides = sums(tokens.logprobs), options.length_normalised
        if not options.reference_free:
            theirs = sums(algorithms.next_token(data["ref_logprobs"], cu_seqlens))
        else:
            theirs = torch.zeros_like(ours)
            if divides:  # here, so that rewards are of the means, too
                ours, divides = ours / lengths.clamp(min=1), False
        sides = [is_chosen, ~is_chosen]
        chosen_lengths, rejected_lengths = (lengths[side] if divides else None for side in sides)
        pairs = algorithms.preference_loss(
            *(x[side] for x in (ours, theirs) for side in sides),
            loss=self.configured,
            beta=self.beta,
            divergence=options.divergence,
            chosen_lengths=chosen_lengths,
            rejected_lengths=rejected_lengths,
        )
        if options.nll_weight:
            nll = -algorithms.sequence_means(tokens.logprobs, mask, cu_seqlens)[is_chosen]
            pairs = PairLoss(pairs.loss + options.nll_weight * nll, {**pairs.metrics, "nll": nll.detach()})
        return self._mean(pairs)


@dataclass(frozen=True, kw_only=True)
class KtoLoss(OnCounted):
    """KTO's loss, a mean over answers.

    `data` holds `ref_logprobs` and `loss_mask` [T], `is_desirable` and `reference_point` [n].
    """

    reported: ClassVar[tuple[str, ...]] = ("desirable_rewards", "undesirable_rewards", "margin", "kl")
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def weight(self, data: Mapping[str, Any]) -> Tensor:
        """Return the number of answers in a pack, the weight of its mean."""
        return torch.ones_like(data["is_desirable"], dtype=torch.long).sum()

    def __call__(self, tokens: TokenLogprobs, data: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Return the scalar loss of a pack, and its metrics."""
        cu_seqlens, mask, is_desirable = data["cu_seqlens"], predicts_counted(data), data["is_desirable"].bool()
        reference = algorithms.next_token(data["ref_logprobs"], cu_seqlens)
        ours, theirs = (algorithms.sequence_sums(x, mask, cu_seqlens) for x in (tokens.logprobs, reference))
        weights = {"desirable_weight": self.desirable_weight, "undesirable_weight": self.undesirable_weight}
        point = data["reference_point"]
        answers = algorithms.kto_loss(ours, theirs, is_desirable, kl=point, beta=self.beta, **weights)
        rewards = answers.metrics["rewards"]
        return answers.loss.mean(), {
            "desirable_rewards": Mean.of(rewards, is_desirable),
            "undesirable_rewards": Mean.of(rewards, ~is_desirable),
            "kl": point.mean(),
        }


@dataclass(frozen=True, kw_only=True)
class RewardModelLoss(_PairMean):
    """The Bradley-Terry loss on the score of each row's last token. `margin` [n] is used if `data` has it."""

    center_coefficient: float = 0.0
    """weight of the squared sum of a pair's scores, which keeps scores near 0"""

    def __call__(self, scores: Tensor, data: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar loss of a pack, and its metrics.

        `scores`: score of each token, `[T]`.
        """
        is_chosen = data["is_chosen"].bool()
        last = scores[data["cu_seqlens"][1:].long() - 1]
        margin = data["margin"][is_chosen] if "margin" in data else None
        sides = last[is_chosen], last[~is_chosen]
        pairs = algorithms.reward_model_loss(*sides, margin=margin, center_coefficient=self.center_coefficient)
        return self._mean(pairs)


def own_values(values: Tensor, data: Mapping[str, Any]) -> Tensor:
    """Return at each token [T] the value of the state in which the token was chosen: a post_hook for `forward`.

    `values`: the critic's values at the positions that predict the tokens, `[T]`.
    """
    return algorithms.previous_token(values, data["cu_seqlens"])
