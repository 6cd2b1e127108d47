"""Losses on packs of preference pairs, each pair's chosen row before its rejected one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlite.algorithms import (
    OnLogprobs,
    PairLoss,
    TokenLogprobs,
    check_preference_loss,
    next_token,
    preference_loss,
    reward_model_loss,
    sequence_sums,
)
from rlite.trainer.policy import predicts_counted

PAIR_METRICS = ("accuracy", "margin", "chosen_rewards", "rejected_rewards")
"""what losses on pairs report"""


@dataclass(frozen=True, kw_only=True)
class DpoLoss(OnLogprobs):
    """A loss of the DPO family; `data` holds `ref_logprobs` [T] of each token, `loss_mask` [T] and `is_chosen` [n]."""

    reported: ClassVar[tuple[str, ...]] = PAIR_METRICS
    loss: str = "sigmoid"
    """a name of `rlite.algorithms.PREFERENCE_LOSSES`"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """of that loss"""
    beta: float = 0.1
    is_length_normalised: bool = False
    """log-probabilities are means over the answer's tokens instead of sums"""

    def __post_init__(self) -> None:
        # a worker may not know the name: it is looked up here, and the function travels
        object.__setattr__(self, "loss", check_preference_loss(self.loss, self.options))

    def positions(self, data: Mapping[str, Any]) -> Tensor:
        """Of the tokens that count."""
        return predicts_counted(data)

    def __call__(self, tokens: TokenLogprobs, data: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        cu_seqlens, mask, is_chosen = data["cu_seqlens"], predicts_counted(data), data["is_chosen"].bool()
        reference = next_token(data["ref_logprobs"], cu_seqlens)
        ours, theirs, lengths = (
            sequence_sums(x, mask, cu_seqlens) for x in (tokens.logprobs, reference, torch.ones_like(reference))
        )
        is_mean = self.is_length_normalised
        pairs = preference_loss(
            ours[is_chosen],
            ours[~is_chosen],
            theirs[is_chosen],
            theirs[~is_chosen],
            loss=self.loss,
            beta=self.beta,
            options=self.options,
            chosen_lengths=lengths[is_chosen] if is_mean else None,
            rejected_lengths=lengths[~is_chosen] if is_mean else None,
        )
        return _mean(pairs)

    def weight(self, data: Mapping[str, Any]) -> Tensor:
        """What a microbatch's mean counts."""
        return num_pairs(data)


@dataclass(frozen=True, kw_only=True)
class RewardModelLoss:
    """Bradley-Terry on the scores of each row's last token; `margin` [n] is used where `data` has it."""

    reported: ClassVar[tuple[str, ...]] = PAIR_METRICS

    def __call__(self, scores: Tensor, data: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        is_chosen = data["is_chosen"].bool()
        last = scores[data["cu_seqlens"][1:].long() - 1]
        margin = data["margin"][is_chosen] if "margin" in data else None
        return _mean(reward_model_loss(last[is_chosen], last[~is_chosen], margin=margin))

    def weight(self, data: Mapping[str, Any]) -> Tensor:
        """What a microbatch's mean counts."""
        return num_pairs(data)


def num_pairs(data: Mapping[str, Any]) -> Tensor:
    """Pairs in a pack."""
    return data["is_chosen"].sum()


def _mean(pairs: PairLoss) -> tuple[Tensor, dict[str, Tensor]]:
    return pairs.loss.mean(), {key: value.mean() for key, value in pairs.metrics.items()}
