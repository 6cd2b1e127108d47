"""Credit: from the rewards of a batch of rollouts to the advantages of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.algorithms import (
    gae,
    kl_penalty,
    last_action_rewards,
    masked_mean,
    masked_variance,
    normalize_rewards,
    outcome_advantages,
)
from rlite.algorithms.advantages.token import ActionTokens
from rlite.errors import DataError
from rlite.observability import stats_tracker
from rlite.rollout.trajectories import first_rows, last_rows, trajectory_index
from rlite.trainer.rl.config import AdvantageOptions, KlOptions


@dataclass(frozen=True)
class Credit:
    """Adds `advantages` [N, L] to a batch, 0 but on action tokens, and with gae `returns` [N, L].

    Reads `rewards` [N] or `token_rewards` [N, L], `group_ids`, `loss_mask`; `values` for gae; `old_logprobs` and
    `ref_logprobs` where the KL is paid of rewards or advantages. A trajectory of several sequences is one member of its
    group, and one series of actions for gae.

    Args:
        adv: how.
        kl: what leaving the reference costs.
        is_single: there is one response to each prompt: the whole batch is one group.
    """

    adv: AdvantageOptions
    kl: KlOptions
    is_single: bool

    def __call__(self, batch: TensorDict) -> TensorDict:
        penalty = self._penalty(batch)
        rewards = token_rewards(batch)
        if self.kl.type == "reward":
            rewards = rewards - penalty
        batch = self._with_gae(batch, rewards) if self.adv.estimator == "gae" else self._with_outcomes(batch, rewards)
        if self.kl.type == "advantage":
            batch["advantages"] = batch["advantages"] - penalty
        return batch

    def _penalty(self, batch: TensorDict) -> Tensor:
        """coef x KL of each action token [N, L]."""
        mask = batch["loss_mask"].bool()
        if self.kl.type not in ("reward", "advantage"):
            return torch.zeros(mask.shape)
        kl = kl_penalty(batch["old_logprobs"], batch["ref_logprobs"], self.kl.reward_estimator)
        stats_tracker.scalar(kl=masked_mean(kl, mask))
        return torch.where(mask, self.kl.coef * kl, 0.0)

    def _with_gae(self, batch: TensorDict, rewards: Tensor) -> TensorDict:
        real, cu_seqlens = _end_to_end(batch)
        mask = batch["loss_mask"][real].bool()
        advantages, returns = gae(
            rewards[real], batch["values"][real], mask, self.adv.gamma, self.adv.lamda, cu_seqlens=cu_seqlens
        )
        advantages = self._normalized(advantages, mask)
        for key, value in (("advantages", advantages), ("returns", returns)):
            batch[key] = torch.zeros(real.shape)
            batch[key][real] = value.float()
        return batch

    def _normalized(self, advantages: Tensor, mask: Tensor) -> Tensor:
        """(A - mean) / std over the action tokens of the batch; the options say which of the two apply.

        Advantages that are all equal have no deviation to be divided by, and stay as they are.
        """
        wide = advantages.double()
        if self.adv.norm_var and len(advantages[mask].unique()) > 1:
            wide = wide * (masked_variance(wide, mask) + 1e-8).rsqrt()
        if self.adv.global_norm:
            wide = wide - masked_mean(wide, mask)
        return torch.where(mask, wide, 0.0)

    def _with_outcomes(self, batch: TensorDict, rewards: Tensor) -> TensorDict:
        """One advantage for all action tokens of a trajectory."""
        real, cu_seqlens = _end_to_end(batch)
        actions = ActionTokens.of(batch["loss_mask"][real].bool(), cu_seqlens)
        table = actions.table(rewards[real])
        discounted = (table * self.adv.gamma ** torch.arange(table.shape[1])).sum(1)
        groups = batch["group_ids"][first_rows(batch)]
        lengths = torch.bincount(actions.rows, minlength=len(discounted))
        # a trajectory without an action learns nothing, but its reward is one of its group
        totals = torch.zeros_like(discounted).index_add(0, trajectory_index(batch), rewards.double().sum(1))
        outcomes = torch.where(lengths > 0, discounted, totals)
        advantages = outcome_advantages(
            self._estimator(),
            outcomes,
            torch.zeros_like(groups) if self.is_single else groups,
            lengths=lengths,
            options=self.adv.options,
        )
        batch["advantages"] = advantages.float()[trajectory_index(batch)][:, None] * batch["loss_mask"]
        return batch

    def _estimator(self) -> str | Callable[..., Tensor]:
        if self.adv.estimator != "reinforce":
            return self.adv.estimator
        level: Any = "batch" if self.adv.global_norm else "group"
        return partial(normalize_rewards, mean=level, std=level if self.adv.norm_var else None)


def token_rewards(batch: TensorDict) -> Tensor:
    """The reward [N, L] of each token.

    A workflow that gives one reward for the whole trajectory means its last action, or its last token if it has none.
    """
    if "token_rewards" in batch:
        return batch["token_rewards"].float()
    if batch["rewards"].dim() != 1:
        shape = list(batch["rewards"].shape)
        raise DataError(f"rewards has shape {shape}; expected [{len(batch)}], one for each row, or token_rewards")
    last = last_rows(batch)
    outcomes = torch.zeros(len(batch)).scatter(0, last, batch["rewards"].float()[last])
    has_action = batch["loss_mask"].any(1, keepdim=True)
    return last_action_rewards(outcomes, torch.where(has_action, batch["loss_mask"], batch["attention_mask"]))


def _end_to_end(batch: TensorDict) -> tuple[Tensor, Tensor]:
    """Which tokens [N, L] there are, and where each trajectory begins among them, `cu_seqlens` [M + 1]."""
    real = batch["attention_mask"].bool()
    index = trajectory_index(batch)
    lengths = torch.zeros(int(index[-1]) + 1, dtype=torch.int64).index_add(0, index, real.sum(1))
    return real, torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
