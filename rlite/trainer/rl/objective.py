"""The objective of a step: the advantages of a batch of rollouts, and the policy's loss on packs.

`data` holds a pack's keys: per-token tensors `[T]`, per-row tensors `[n]`, and `cu_seqlens` `[n + 1]`. A token's value
stands at the token. A loss reads it with `next_token` at the position that predicts the token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite import algorithms
from rlite.algorithms import LossInputs, Mean, OnLogprobs, PerToken, TokenLogprobs
from rlite.algorithms.advantages.group import ActionTokens
from rlite.algorithms.reduce import Configured
from rlite.data.packs import check_one_per_row, first_rows, last_rows, trajectory_index, with_keys
from rlite.errors import ConfigError
from rlite.observability import stats_tracker
from rlite.trainer.model.options import check_kl_loss
from rlite.trainer.rl.options import AdvantageOptions, KlOptions
from rlite.trainer.rl.token_advantages import of_named_rewards, outcome_estimator, token_advantages
from rlite.types import Aggregation, KLEstimator

# -- advantages --------------------------------------------------------------------------------------------------------


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

    `batch`: has `rewards` or `token_rewards`, `group_ids`, `loss_mask`; `values` for gae; `old_logprobs` and
    `ref_logprobs` if the KL to the reference is subtracted from rewards or advantages, over the vocabulary:
    `full_old_logprobs` replaces `old_logprobs` there, if the batch has kept ids. `kl_coef`: weight of the KL; default:
    `kl.coef`. `weights`: weights of rewards by name for gdpo, which needs `reward/NAME` in the batch; default: 1.
    """
    penalty, rewards = _penalty(batch, kl, kl.coef if kl_coef is None else kl_coef), token_rewards(batch)
    groups = batch["group_ids"][first_rows(batch)]
    if is_single:
        groups = torch.zeros_like(groups)
    if kl.type == "reward":
        rewards = rewards - penalty
    if estimator := estimator or outcome_estimator(adv):
        columns = _outcomes(batch, rewards, groups, adv.gamma, estimator, weights or {})
    else:
        columns = token_advantages(batch, rewards, adv, groups, *_end_to_end(batch))
    if kl.type == "advantage":
        columns["advantages"] = columns["advantages"] - penalty
    return with_keys(batch, **columns)


def _penalty(batch: TensorDict, kl: KlOptions, coef: float) -> Tensor:
    """Return coef x KL of each action token [N, L]."""
    mask = batch["loss_mask"].bool()
    if kl.type not in ("reward", "advantage"):
        return torch.zeros(mask.shape)
    old = batch["full_old_logprobs" if "full_old_logprobs" in batch else "old_logprobs"]
    divergence = algorithms.kl_penalty(old, batch["ref_logprobs"], kl.reward_estimator)
    stats_tracker.scalar(kl=algorithms.masked_mean(divergence, mask))
    return torch.where(mask, coef * divergence, 0.0)


def _outcomes(
    batch: TensorDict,
    rewards: Tensor,
    groups: Tensor,
    gamma: float,
    estimator: Configured,
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
        scores, estimator = of_named_rewards(batch, estimator, weights)
    advantages = algorithms.outcome_advantages(estimator, scores, groups, lengths=lengths)
    return {"advantages": advantages.float()[index][:, None] * batch["loss_mask"]}


def token_rewards(batch: TensorDict) -> Tensor:
    """Return the reward [N, L] of each token.

    The reward of a whole trajectory goes to its last action, or to its last token if it has no action.
    """
    if "token_rewards" in batch:
        return batch["token_rewards"].float()
    check_one_per_row(batch, "rewards")
    last = last_rows(batch)
    outcomes = torch.zeros(len(batch)).scatter(0, last, batch["rewards"].float()[last])
    has_action = batch["loss_mask"].any(1, keepdim=True)
    mask = torch.where(has_action, batch["loss_mask"], batch["attention_mask"])
    return algorithms.last_action_rewards(outcomes, mask)


def _end_to_end(batch: TensorDict) -> tuple[Tensor, Tensor]:
    """Return which positions [N, L] hold tokens, and where each trajectory begins among those, `cu_seqlens` [M + 1]."""
    real = batch["attention_mask"].bool()
    index = trajectory_index(batch)
    lengths = torch.zeros(int(index[-1]) + 1, dtype=torch.int64).index_add(0, index, real.sum(1))
    return real, torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


# -- the loss of a pack ------------------------------------------------------------------------------------------------


OWN_METRICS = {
    *("loss", "entropy", "kl", "logprob_drift", "rejected", "off_policy_dropped", "trained_logprobs", "entropies"),
    *("weight", "loss_weight", "grad_norm", "lr", "is_skipped", "num_tokens", "num_microbatches", "memory_gib", "mfu"),
    *("shared_tokens", "divergence", "entropy_coef", "kl_coef", "clip", "clip_high", "temperature"),
    *("step", "reward", "score", "response_length", "truncated", "seconds", "tokens_per_second"),
}
"""metrics of rlite: a policy loss's metric NAME of such a name is called policy_loss/NAME"""


def predicts_counted(data: Mapping[str, Any]) -> Tensor:
    """Return whether the token that follows a position counts, `[T]`."""
    return algorithms.next_token(data["loss_mask"], data["cu_seqlens"]).bool()


class OnCounted(OnLogprobs):
    """A loss on the log-probabilities of the tokens that count."""

    def positions(self, data: Mapping[str, Any]) -> Tensor:
        """Return the positions that predict a token that counts, `[T]`."""
        return predicts_counted(data)


@dataclass(frozen=True, kw_only=True)
class TokenMean:
    """A loss that averages over the tokens that count, by `avg_level`."""

    avg_level: Aggregation = "token"
    max_new_tokens: int | None = None
    """divisor of avg_level "constant" """

    def weight(self, data: Mapping[str, Any]) -> Tensor:
        """Return the weight of a microbatch's mean."""
        return algorithms.aggregation_weight(predicts_counted(data), self.avg_level, data["cu_seqlens"])

    def _mean(self, per_token: Tensor, mask: Tensor, data: Mapping[str, Any]) -> Tensor:
        cu_seqlens, length = data["cu_seqlens"], self.max_new_tokens
        return algorithms.aggregate(per_token, mask, self.avg_level, cu_seqlens=cu_seqlens, length=length)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(TokenMean, OnCounted):
    """A policy loss on a pack: the mean over the tokens of the batch by default (`avg_level`).

    `data` holds `advantages`, `logprobs` (the sampler's) and `loss_mask`, each `[T]`. Without `old_logprobs`, the
    current policy is also the old policy: the ratio is 1 and only carries the gradient. The sampler's log-probabilities
    then only weight tokens (truncated importance sampling). `selected` is the result of `select` over the whole batch.
    If `data` has kept ids, all policies are compared over them. The entropy and the KL to the reference are over the
    vocabulary.
    """

    policy_loss: str | algorithms.PolicyLossFunction = "ppo_clip"
    """a name of `rlite.algorithms.POLICY_LOSSES`, or a function like them"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """options of that loss"""
    clip_low: float = 0.2
    """lower clip range of ppo_clip alone; other losses have clip ranges of another scale in `options`"""
    clip_high: float = 0.2
    """upper clip range of ppo_clip alone"""
    temperature: float = 1.0
    tis_coef: float | None = 2.0
    """cap of the truncated importance weight exp(old - sampler); None is off"""
    rejection: Mapping[str, Any] = field(default_factory=dict)
    """keyword arguments of `rejection_mask` between the old policy and the sampler; {} rejects nothing. A rejected
    token has no loss, but still counts in the average"""
    off_policy_threshold: float | None = None
    """threshold of `off_policy_sequence_mask`; None is off. A token that it drops keeps its entropy and KL terms"""
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    """weight of the KL to the reference; `data` then holds `ref_logprobs` [T]"""
    kl_estimator: KLEstimator = "k2"
    returns_tokens: bool = False
    """also report `trained_logprobs` and `entropies` of the tokens"""
    configured: Configured = field(init=False, repr=False, compare=False)
    """the policy loss with its options, checked"""

    def __post_init__(self) -> None:
        if self.avg_level == "constant" and not self.max_new_tokens:
            raise ConfigError("avg_level=constant divides by max_new_tokens: give rollout.train_sampling_params")
        check_kl_loss(self.kl_estimator)
        algorithms.check_rejection(self.rejection)
        # a worker may not know the name: it is looked up here, and the function travels
        function = algorithms.POLICY_LOSSES.check(self.policy_loss, self.options)
        clip, own = {"clip_low": self.clip_low, "clip_high": self.clip_high}, dict(self.options)
        if function is algorithms.ppo_clip:
            own = clip | own
        elif clip != {"clip_low": 0.2, "clip_high": 0.2}:
            told = f"actor.clip and actor.clip_high are options of ppo_clip alone, not of {self.policy_loss}"
            raise ConfigError(f"{told}: its clip range has another scale; set actor.policy_loss.options")
        object.__setattr__(self, "policy_loss", function)
        object.__setattr__(self, "configured", Configured.of(algorithms.POLICY_LOSSES, function, own))

    def __call__(self, tokens: TokenLogprobs, data: Mapping[str, Any]) -> tuple[Tensor, dict[str, Mean | PerToken]]:
        """Return the scalar loss of a pack, and its metrics.

        `tokens`: log-probabilities and entropies at the positions that predict the tokens, `[T]`.
        """
        cu_seqlens, mask = data["cu_seqlens"], predicts_counted(data)
        keys = ("logprobs", "old_logprobs", "advantages", "ref_logprobs", "selected")
        at = {key: algorithms.next_token(data[key], cu_seqlens) for key in keys if key in data}
        behaviour, old = at["logprobs"], at.get("old_logprobs", tokens.logprobs.detach())
        weights = None
        if self.tis_coef is not None:
            weights = algorithms.importance_weights(old, behaviour, mask, upper=self.tis_coef)
        kept = self._kept(old, behaviour, mask, cu_seqlens)
        selected = at["selected"].bool() if "selected" in at else None
        inputs = LossInputs(tokens.logprobs, old, at["advantages"], kept, behaviour, weights, cu_seqlens, selected)
        loss, metrics = algorithms.policy_loss(self.configured, inputs)
        report = {f"policy_loss/{name}" if name in OWN_METRICS else name: value for name, value in metrics.items()}
        report |= {"entropy": tokens.entropy, "logprob_drift": (old - behaviour).abs()}
        if (bound := self.off_policy_threshold) is not None:
            given = tokens.logprobs, behaviour, inputs.advantages, mask
            near = algorithms.off_policy_sequence_mask(*given, threshold=bound, cu_seqlens=cu_seqlens)
            loss, report["off_policy_dropped"] = torch.where(near, loss, 0.0), (~near).to(loss.dtype)
        loss = loss - self.entropy_coef * tokens.entropy if self.entropy_coef else loss
        if self.kl_coef:
            report["kl"] = algorithms.kl_penalty(tokens.full_logprobs, at["ref_logprobs"], self.kl_estimator)
            loss = loss + self.kl_coef * report["kl"]
        if self.rejection:
            loss, report["rejected"] = torch.where(kept, loss, 0.0), (~kept).to(loss.dtype)
        means = {key: Mean.of(value, mask) for key, value in report.items()}
        return self._mean(loss, mask, data), means | self._of_tokens(tokens, mask, cu_seqlens)

    def _of_tokens(self, tokens: TokenLogprobs, mask: Tensor, cu_seqlens: Tensor) -> dict[str, PerToken]:
        if not self.returns_tokens:
            return {}
        values = {"trained_logprobs": tokens.logprobs, "entropies": tokens.entropy}
        masked = {name: torch.where(mask, value.detach(), 0.0) for name, value in values.items()}
        return {name: PerToken(algorithms.previous_token(value, cu_seqlens)) for name, value in masked.items()}

    def select(self, batch: Mapping[str, Any], logprobs: Tensor) -> Tensor:
        """Return the tokens of a whole batch that the loss treats differently, if it is a loss of `SELECTIONS`.

        Returns True for the chosen tokens, in the batch's layout.
        """
        old, behaviour = batch.get("old_logprobs", logprobs), batch["logprobs"]
        kept = self._kept(old, behaviour, batch["loss_mask"], None)
        inputs = LossInputs(logprobs, old, batch["advantages"], kept, behaviour_logprobs=behaviour)
        return algorithms.select_tokens(self.policy_loss, inputs, self.options)

    def _kept(self, old: Tensor, behaviour: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Return the mask without the rejected tokens."""
        if not self.rejection:
            return mask
        return algorithms.rejection_mask(old, behaviour, mask, cu_seqlens=cu_seqlens, **self.rejection)


@dataclass(frozen=True, kw_only=True)
class OwnLogprobs(OnLogprobs):
    """A post_hook for `forward` that returns each token's log-probability."""

    temperature: float = 1.0
    is_full: bool = False
    """in the whole vocabulary, also for a token that was sampled among kept ids"""

    def __call__(self, tokens: TokenLogprobs, data: Mapping[str, Any]) -> Tensor:
        """Return each token's log-probability [T], at the token; 0 for a sequence's first token.

        `tokens`: log-probabilities at the positions that predict the tokens, `[T]`.
        """
        return algorithms.previous_token(tokens.full_logprobs if self.is_full else tokens.logprobs, data["cu_seqlens"])


class BothLogprobs(OwnLogprobs):
    """A post_hook for `forward` that returns two log-probabilities of each token."""

    def __call__(self, tokens: TokenLogprobs, data: Mapping[str, Any]) -> Tensor:
        """Return each token's log-probability over its kept ids, and over the vocabulary, [T, 2]; see `OwnLogprobs`."""
        both = torch.stack([tokens.logprobs, tokens.full_logprobs], dim=-1)
        return algorithms.previous_token(both, data["cu_seqlens"])
