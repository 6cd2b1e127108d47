"""The policy that trainers train: any Hugging Face causal model with an AdamW, and its losses on packs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from accelerate import init_empty_weights
from torch import Tensor

from rlite.algorithms import (
    Mean,
    OnLogprobs,
    PolicyLossFunction,
    Schedule,
    TokenLogprobs,
    aggregate,
    aggregation_weight,
    check_policy_loss,
    importance_weights,
    kl_penalty,
    lr_factor,
    next_token,
    policy_loss,
    ppo_clip,
    previous_token,
    select_tokens,
)
from rlite.algorithms.kl import KLEstimator
from rlite.errors import ConfigError
from rlite.nn.heads import HuggingFaceFsdp2ScoreModule, score_module
from rlite.nn.huggingface import HuggingFaceFsdp2TrainModule, causal_lm_class
from rlite.nn.lora import LoraOptions, LoraTrainModule

AvgLevel = Literal["token", "sequence", "constant"]


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW with a schedule over `total_steps` optimizer steps."""

    lr: float
    weight_decay: float
    scheduler: Schedule
    warmup_steps: int
    total_steps: int
    lr_end: float = 0.0
    """rate at the last step"""
    power: float = 1.0
    """of the schedule "polynomial" """


class _Optimized(LoraTrainModule):
    """With the optimizer that `optimizer_options` describe; without them it is a reference model."""

    optimizer_options: OptimizerOptions | None = None

    def on_weights_materialized(self) -> None:
        options = self.optimizer_options
        if options is None:
            return
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        # fused: each parameter's memory is passed over once instead of ten times
        self.optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=options.weight_decay, fused=True)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, partial(schedule, options=options))

    def on_state_loaded(self) -> None:
        """Take the peak rate and the weight decay of this run's options: those that were saved may be of others."""
        options, scheduler = self.optimizer_options, self.lr_scheduler
        if options is None or self.optimizer is None or scheduler is None:
            return
        lr = options.lr * schedule(scheduler.last_epoch, options)
        scheduler.base_lrs = [options.lr for _ in scheduler.base_lrs]
        for group in self.optimizer.param_groups:
            group.update(initial_lr=options.lr, lr=lr, weight_decay=options.weight_decay)


class PolicyModule(_Optimized, HuggingFaceFsdp2TrainModule):
    """A causal model."""

    _keeps_dropout = False


class CriticModule(_Optimized, HuggingFaceFsdp2ScoreModule):
    """A number for each token: a critic's values, or a reward model's scores."""

    _keeps_dropout = False


def schedule(step: int, options: OptimizerOptions) -> float:
    """The factor of the peak rate at a step: linear warm-up to 1, then by the schedule down to `lr_end`."""
    return lr_factor(
        step,
        options.scheduler,
        total_steps=options.total_steps,
        warmup_steps=options.warmup_steps,
        min_factor=options.lr_end / options.lr if options.lr else 0.0,
        power=options.power,
    )


def policy_module(
    path: str | Path,
    optimizer_options: OptimizerOptions | None = None,
    lora: LoraOptions | None = None,
    disable_dropout: bool = True,
) -> PolicyModule:
    """The checkpoint at `path` as a train module on meta; with `lora` only adapters beside its weights are trained."""
    with init_empty_weights():
        module = causal_lm_class(path, _carrier(PolicyModule, disable_dropout)).from_pretrained(path)
    return _optimized(module, optimizer_options, lora)


def critic_module(
    path: str | Path,
    optimizer_options: OptimizerOptions | None = None,
    lora: LoraOptions | None = None,
    disable_dropout: bool = True,
) -> CriticModule:
    """The checkpoint at `path`, of a causal model or of an earlier critic, as a train module on meta.

    With `lora` only its head, and adapters beside its other weights, are trained.
    """
    return _optimized(score_module(path, _carrier(CriticModule, disable_dropout)), optimizer_options, lora)


def _carrier(carrier: Any, disable_dropout: bool) -> Any:
    """The class with another setting under the same name, by which checkpoints know their module."""
    return carrier if disable_dropout else type(carrier.__name__, (carrier,), {"_keeps_dropout": True})


def _optimized(module: Any, optimizer_options: OptimizerOptions | None, lora: LoraOptions | None) -> Any:
    if lora is not None:
        module.add_lora(lora)
    module.optimizer_options = optimizer_options
    return module


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(OnLogprobs):
    """A policy loss on a pack, Dr. GRPO's by default; `data` holds advantages, logprobs and loss_mask, each [T].

    `selected` [T], if the loss is of `SELECTIONS`, is what `select` chose over the whole batch.
    Where `old_logprobs` [T] is absent, the policy of this very update is the old one: the ratio is 1 and carries the
    gradient alone. The rollout's own log-probabilities then only weigh tokens (truncated importance sampling).
    """

    policy_loss: str | PolicyLossFunction = "ppo_clip"
    """a name of `rlite.algorithms.POLICY_LOSSES`, or a function like them"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """of that loss"""
    clip_low: float = 0.2
    """of ppo_clip alone, as is clip_high: what another loss clips is of another size"""
    clip_high: float = 0.2
    avg_level: AvgLevel = "token"
    temperature: float = 1.0
    max_new_tokens: int | None = None
    """divisor of avg_level "constant" """
    tis_coef: float | None = 2.0
    """cap of the truncated importance weight exp(old - rollout); None is off"""
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    """weight of the KL to the reference, whose `ref_logprobs` [T] `data` then holds"""
    kl_estimator: KLEstimator = "k2"

    def __post_init__(self) -> None:
        if self.avg_level == "constant" and not self.max_new_tokens:
            raise ConfigError("avg_level=constant divides by max_new_tokens: give rollout.train_sampling_params")
        check_kl_loss(self.kl_estimator)
        # a worker may not know the name: it is looked up here, and the function travels
        function = check_policy_loss(self.policy_loss, self.options)
        clip = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        if function is ppo_clip:
            object.__setattr__(self, "options", clip | dict(self.options))
        elif clip != {"clip_low": 0.2, "clip_high": 0.2}:
            raise ConfigError(
                f"actor.clip and actor.clip_high are of ppo_clip alone, not of {self.policy_loss}: what it clips is of "
                "another size, and set in actor.policy_loss.options"
            )
        object.__setattr__(self, "policy_loss", function)

    def positions(self, data: Mapping[str, Any]) -> Tensor:
        """Of the tokens that count."""
        return predicts_counted(data)

    def __call__(self, tokens: TokenLogprobs, data: Mapping[str, Any]) -> tuple[Tensor, dict[str, Mean]]:
        cu_seqlens, mask = data["cu_seqlens"], predicts_counted(data)
        logprobs, entropy = tokens
        behaviour = next_token(data["logprobs"], cu_seqlens)
        old = next_token(data["old_logprobs"], cu_seqlens) if "old_logprobs" in data else logprobs.detach()
        weights = None
        if self.tis_coef is not None:
            weights = importance_weights(old, behaviour, mask, upper=self.tis_coef)
        token_loss = policy_loss(
            self.policy_loss,
            logprobs,
            old,
            next_token(data["advantages"], cu_seqlens),
            mask=mask,
            cu_seqlens=cu_seqlens,
            weights=weights,
            behaviour_logprobs=behaviour,
            selected=next_token(data["selected"], cu_seqlens).bool() if "selected" in data else None,
            options=self.options,
        )
        kl = self._kl(logprobs, data)
        per_token = token_loss.loss - self.entropy_coef * entropy + self.kl_coef * kl
        loss = aggregate(per_token, mask, self.avg_level, cu_seqlens=cu_seqlens, length=self.max_new_tokens)
        drift = (old - behaviour).abs()
        report = {**token_loss.metrics, "entropy": entropy, "logprob_drift": drift}
        if self.kl_coef:
            report["kl"] = kl
        return loss, {key: Mean.of(value, mask) for key, value in report.items()}

    def _kl(self, logprobs: Tensor, data: Mapping[str, Any]) -> Tensor:
        """To the reference, of each token."""
        if not self.kl_coef:
            return torch.zeros_like(logprobs)
        return kl_penalty(logprobs, next_token(data["ref_logprobs"], data["cu_seqlens"]), self.kl_estimator)

    def select(self, batch: Mapping[str, Any], logprobs: Tensor) -> Tensor:
        """Return the tokens of a whole batch that the loss treats apart; of the losses in `SELECTIONS` alone.

        Args:
            batch: as `data`, in any layout.
            logprobs: each token's under the policy that is trained, at its own position.
        """
        return select_tokens(
            self.policy_loss,
            logprobs,
            batch.get("old_logprobs", logprobs),
            batch["advantages"],
            mask=batch["loss_mask"],
            behaviour_logprobs=batch["logprobs"],
            options=self.options,
        )

    def weight(self, data: Mapping[str, Any]) -> Tensor:
        """What a microbatch's mean counts."""
        return aggregation_weight(predicts_counted(data), self.avg_level, data["cu_seqlens"])


@dataclass(frozen=True, kw_only=True)
class SftLoss(OnLogprobs):
    """Cross entropy of the tokens where loss_mask is 1."""

    reported: ClassVar[tuple[str, ...]] = ()
    avg_level: Literal["token", "sequence"] = "token"

    def positions(self, data: Mapping[str, Any]) -> Tensor:
        """Of the tokens that count."""
        return predicts_counted(data)

    def __call__(self, tokens: TokenLogprobs, data: Mapping[str, Any]) -> Tensor:
        mask, cu_seqlens = predicts_counted(data), data["cu_seqlens"]
        return aggregate(-tokens.logprobs, mask, self.avg_level, cu_seqlens=cu_seqlens)

    def weight(self, data: Mapping[str, Any]) -> Tensor:
        """What a microbatch's mean counts."""
        return aggregation_weight(predicts_counted(data), self.avg_level, data["cu_seqlens"])


@dataclass(frozen=True, kw_only=True)
class OwnLogprobs(OnLogprobs):
    """A post_hook for `forward`: each token's log-probability [T], at its own position; 0 for a sequence's first."""

    temperature: float = 1.0

    def __call__(self, tokens: TokenLogprobs, data: Mapping[str, Any]) -> Tensor:
        return previous_token(tokens.logprobs, data["cu_seqlens"])


def check_kl_loss(estimator: KLEstimator) -> None:
    """Raise ConfigError for an estimator that is no loss."""
    if estimator == "k1":
        raise ConfigError(
            "kl.loss_estimator=k1: its gradient is that of log pi, which is 0 in expectation, so that it would add "
            "noise and no penalty. Use k2, whose gradient is that of the KL, or kl.type=reward, where k1 is unbiased"
        )


def predicts_counted(data: Mapping[str, Any]) -> Tensor:
    """Whether the token that follows a position counts."""
    return next_token(data["loss_mask"], data["cu_seqlens"]).bool()
