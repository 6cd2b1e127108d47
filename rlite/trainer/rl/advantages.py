"""From a batch of rollouts to the advantages of its tokens, and the log-probabilities under other policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.algorithms import (
    ADVANTAGES,
    gae,
    kl_penalty,
    last_action_rewards,
    masked_mean,
    masked_variance,
    normalize_rewards,
    outcome_advantages,
    reinforce_pp_advantages,
)
from rlite.algorithms.advantages.base import ActionTokens
from rlite.algorithms.calls import Configured
from rlite.batch import NAMED_REWARD
from rlite.data.packs import with_keys
from rlite.errors import DataError
from rlite.observability import stats_tracker
from rlite.rollout.trajectories import first_rows, last_rows, trajectory_index
from rlite.trainer.rl.engines import Engines
from rlite.trainer.rl.options import WHITENED, AdvantageOptions, KlOptions
from rlite.trainer.rl.policy_loss import BothLogprobs, OwnLogprobs
from rlite.trainer.rl.statistics import report_off_policy


class LogprobPasses:
    """The forward passes that compute log-probabilities of rollouts under other policies.

    Args:
        engines: take turns on the device.
        temperature: temperature of the log-probabilities that are trained.
        has_reference: leaving the reference policy costs something.
        is_base_reference: the reference is the actor without its adapters.
        has_old: something compares with the policy before the updates of a batch.
        longest: tokens of one microbatch of the actor and of the reference; None is the engine's default.
        reports_off_policy: report `off_policy/*`.
        tis_coef: cap of the importance weights there.
    """

    def __init__(
        self,
        engines: Engines,
        temperature: float,
        *,
        has_reference: bool = False,
        is_base_reference: bool = False,
        has_old: bool = False,
        longest: tuple[int | None, int | None] = (None, None),
        reports_off_policy: bool = False,
        tis_coef: float | None = None,
    ) -> None:
        self._engines = engines
        self._full = OwnLogprobs(temperature=temperature, is_full=True)
        self._both = BothLogprobs(temperature=temperature)
        self._has_reference, self._is_base, self._has_old = has_reference, is_base_reference, has_old
        self._longest, self._longest_of_reference = longest
        self._reports_off_policy, self._tis_coef = reports_off_policy, tis_coef

    def with_reference(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `ref_logprobs` [N, L] in the whole vocabulary, if leaving the reference costs something.

        The reference is a model of its own, or the actor without its adapters.
        """
        if not self._has_reference:
            return batch
        with stats_tracker.record_timing("reference"):
            engine = self._engines.reference or self._engines.actor
            self._engines.move_to_device(engine)
            logprobs = engine.forward(batch, self._full, self._longest_of_reference, without_adapters=self._is_base)
        return with_keys(batch, ref_logprobs=logprobs)

    def with_old(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `old_logprobs` [N, L], from before the updates, if something compares with them.

        If the batch has kept ids, they are over these, and `full_old_logprobs` [N, L] in the whole vocabulary.
        """
        if not self._has_old:
            return batch
        with stats_tracker.record_timing("old_logprobs"):
            self._engines.move_to_device(self._engines.actor)
            found = self._engines.actor.forward(batch, self._both, self._longest)
        columns = {"old_logprobs": found[..., 0].contiguous()}
        if "kept_counts" in batch:
            columns["full_old_logprobs"] = found[..., 1].contiguous()
        batch = with_keys(batch, **columns)
        if self._reports_off_policy:
            report_off_policy(batch, self._tis_coef)
        return batch


def compute_advantages(
    batch: TensorDict,
    adv: AdvantageOptions,
    kl: KlOptions,
    is_single: bool,
    kl_coef: float | None = None,
    weights: Mapping[str, float] | None = None,
    estimator: Configured | None = None,
) -> TensorDict:
    """Return a batch with `advantages` [N, L], 0 off the model's own tokens, and for gae `returns` [N, L].

    A trajectory of several sequences is one member of its group, and one series of actions for gae.

    Args:
        batch: has `rewards` or `token_rewards`, `group_ids`, `loss_mask`; `values` for gae; `old_logprobs` and
            `ref_logprobs` if the KL to the reference is subtracted from rewards or advantages, over the vocabulary:
            `full_old_logprobs` replaces `old_logprobs` there, if the batch has kept ids.
        adv: the estimator and its options.
        kl: what leaving the reference costs.
        is_single: there is one response to each prompt, so that the whole batch is one group.
        kl_coef: weight of the KL; default: `kl.coef`.
        weights: weights of rewards by name for gdpo, which needs `reward/NAME` in the batch; default: 1.
        estimator: the result of `outcome_estimator(adv)`, which need not be made for every batch.
    """
    penalty, rewards = _penalty(batch, kl, kl.coef if kl_coef is None else kl_coef), token_rewards(batch)
    if kl.type == "reward":
        rewards = rewards - penalty
    if estimator := estimator or outcome_estimator(adv):
        columns = _outcomes(batch, rewards, adv.gamma, estimator, is_single, weights or {})
    elif adv.estimator == "gae":
        columns = _gae(batch, rewards, adv)
    else:
        columns = _whitened(batch, rewards, adv, is_single)
    if kl.type == "advantage":
        columns["advantages"] = columns["advantages"] - penalty
    return with_keys(batch, **columns)


def _penalty(batch: TensorDict, kl: KlOptions, coef: float) -> Tensor:
    """Return coef x KL of each action token [N, L]."""
    mask = batch["loss_mask"].bool()
    if kl.type not in ("reward", "advantage"):
        return torch.zeros(mask.shape)
    old = batch["full_old_logprobs" if "full_old_logprobs" in batch else "old_logprobs"]
    divergence = kl_penalty(old, batch["ref_logprobs"], kl.reward_estimator)
    stats_tracker.scalar(kl=masked_mean(divergence, mask))
    return torch.where(mask, coef * divergence, 0.0)


def _gae(batch: TensorDict, rewards: Tensor, adv: AdvantageOptions) -> dict[str, Tensor]:
    real, cu_seqlens = _end_to_end(batch)
    mask = batch["loss_mask"][real].bool()
    advantages, returns = gae(rewards[real], batch["values"][real], mask, adv.gamma, adv.lamda, cu_seqlens=cu_seqlens)
    return {"advantages": _placed(_normalized(advantages, mask, adv), real), "returns": _placed(returns, real)}


def _whitened(batch: TensorDict, rewards: Tensor, adv: AdvantageOptions, is_single: bool) -> dict[str, Tensor]:
    """Return REINFORCE++'s advantage of each token: whitened returns, or whitened outcomes over their group's mean."""
    real, cu_seqlens = _end_to_end(batch)
    groups = None if adv.estimator == "reinforce_pp" else _groups(batch, is_single)
    mask = batch["loss_mask"][real].bool()
    whitened = reinforce_pp_advantages(rewards[real], mask, adv.gamma, group_ids=groups, cu_seqlens=cu_seqlens)
    return {"advantages": _placed(whitened, real)}


def _placed(values: Tensor, real: Tensor) -> Tensor:
    """Return the values of tokens at their places [N, L], and 0 elsewhere."""
    return torch.zeros(real.shape).masked_scatter(real, values.float())


def _groups(batch: TensorDict, is_single: bool) -> Tensor:
    """Return the group of each trajectory [M]; with one response to each prompt the whole batch is one group."""
    groups = batch["group_ids"][first_rows(batch)]
    return torch.zeros_like(groups) if is_single else groups


def _normalized(advantages: Tensor, mask: Tensor, adv: AdvantageOptions) -> Tensor:
    """Return (A - mean) / std over the action tokens of the batch; the options say which of the two apply.

    Advantages that are all equal have no deviation to be divided by, and stay as they are.
    """
    wide = advantages.double()
    if adv.norm_var and len(advantages[mask].unique()) > 1:
        wide = wide * (masked_variance(wide, mask) + 1e-8).rsqrt()
    if adv.global_norm:
        wide = wide - masked_mean(wide, mask)
    return torch.where(mask, wide, 0.0)


def _outcomes(
    batch: TensorDict,
    rewards: Tensor,
    gamma: float,
    estimator: Configured,
    is_single: bool,
    weights: Mapping[str, float],
) -> dict[str, Tensor]:
    """Return the same advantage for all action tokens of a trajectory."""
    real, cu_seqlens = _end_to_end(batch)
    index = trajectory_index(batch)
    actions = ActionTokens.of(batch["loss_mask"][real].bool(), cu_seqlens)
    table = actions.table(rewards[real])
    discounted = (table * gamma ** torch.arange(table.shape[1])).sum(1)
    lengths = torch.bincount(actions.rows, minlength=len(discounted))
    # a trajectory without an action learns nothing, but its reward is one of its group
    totals = torch.zeros_like(discounted).index_add(0, index, rewards.double().sum(1))
    scores = torch.where(lengths > 0, discounted, totals)
    if estimator.name == "gdpo":
        kinds = _named_rewards(batch)
        scores = torch.stack([*kinds.values()])
        given = {"weights": [weights.get(name, 1.0) for name in kinds], **estimator.options}
        estimator = replace(estimator, options=given)
    advantages = outcome_advantages(estimator, scores, _groups(batch, is_single), lengths=lengths)
    return {"advantages": advantages.float()[index][:, None] * batch["loss_mask"]}


def _named_rewards(batch: TensorDict) -> dict[str, Tensor]:
    """Return each named reward of the trajectories [M], NaN if it does not count, by its name.

    Raises:
        DataError: there are none.
    """
    keys = sorted(key for key in map(str, batch.keys()) if key.startswith(NAMED_REWARD))
    if not keys:
        raise DataError("adv.estimator=gdpo: the batch has no reward/NAME; a reward with parts by name writes them")
    first = first_rows(batch)
    return {key.removeprefix(NAMED_REWARD): batch[key][first].double() for key in keys}


def outcome_estimator(adv: AdvantageOptions) -> Configured | None:
    """Return the estimator of outcomes that the options name; None for gae and the whitened estimators."""
    if adv.estimator in ("gae", *WHITENED):
        return None
    if adv.estimator != "reinforce":
        return Configured.of(ADVANTAGES, adv.estimator, adv.options)
    level: Any = "batch" if adv.global_norm else "group"
    mean = partial(normalize_rewards, mean=level, std=level if adv.norm_var else None)
    return Configured.of(ADVANTAGES, mean, adv.options)


def token_rewards(batch: TensorDict) -> Tensor:
    """Return the reward [N, L] of each token.

    The reward of a whole trajectory goes to its last action, or to its last token if it has no action.

    Raises:
        DataError: `rewards` is not [N], and there are no `token_rewards`.
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
    """Return which positions [N, L] hold tokens, and where each trajectory begins among those, `cu_seqlens` [M + 1]."""
    real = batch["attention_mask"].bool()
    index = trajectory_index(batch)
    lengths = torch.zeros(int(index[-1]) + 1, dtype=torch.int64).index_add(0, index, real.sum(1))
    return real, torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
