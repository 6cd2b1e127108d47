"""Log-probabilities of rollouts under the policy before its updates, and under the reference.

The critic of PPO, which predicts the return of every state.

The weight of the KL to the reference during a run. The rule that adapts it is `algorithms.adaptive_kl_coef`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict

from rlite.algorithms import adaptive_kl_coef, importance_weights, is_selective, off_policy_metrics, weight_metrics
from rlite.data.packs import with_keys
from rlite.engine.train import RliteTrainEngine
from rlite.observability import stats_tracker
from rlite.trainer.losses import BothLogprobs, OwnLogprobs, PolicyLoss, ValueLoss, own_values
from rlite.trainer.rl.engines import Engines
from rlite.trainer.rl.options import KlOptions, PpoConfig
from rlite.trainer.run.training_run import loss_stats


class LogprobPasses:
    """The forward passes that compute log-probabilities of rollouts under other policies.

    Args:
        options: the run's config.
        engines: take turns on the device.
    """

    def __init__(self, options: PpoConfig, engines: Engines) -> None:
        self._options, self._engines = options, engines
        self._full = OwnLogprobs(temperature=options.temperature, is_full=True)
        self._both = BothLogprobs(temperature=options.temperature)

    def with_reference(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `ref_logprobs` [N, L] in the whole vocabulary, if leaving the reference costs something.

        The reference is a model of its own, or the actor without its adapters.
        """
        options, engines = self._options, self._engines
        if not options.has_reference:
            return batch
        with stats_tracker.record_timing("reference"):
            engine, longest = engines.reference or engines.actor, options.inference_length(options.ref_actor)
            engines.move_to_device(engine)
            logprobs = engine.forward(batch, self._full, longest, without_adapters=options.is_base_reference)
        return with_keys(batch, ref_logprobs=logprobs)

    def with_old(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `old_logprobs` [N, L], from before the updates, if something compares with them.

        If the batch has kept ids, they are over these, and `full_old_logprobs` [N, L] in the whole vocabulary.
        """
        options, engines = self._options, self._engines
        if not options.has_old_logprobs:
            return batch
        with stats_tracker.record_timing("old_logprobs"):
            engines.move_to_device(engines.actor)
            found = engines.actor.forward(batch, self._both, options.inference_length())
        columns = {"old_logprobs": found[..., 0].contiguous()}
        if "kept_counts" in batch:
            columns["full_old_logprobs"] = found[..., 1].contiguous()
        batch = with_keys(batch, **columns)
        if options.actor.off_policy_metrics:
            report_off_policy(batch, options.actor.tis_coef)
        return batch


def report_off_policy(batch: TensorDict, tis_coef: float | None) -> None:
    """Record `off_policy/*`: `off_policy_metrics`, and `weight_metrics` of the truncated importance weights.

    Args:
        batch: rollouts with `old_logprobs`, `logprobs` and `loss_mask`, each `[N, L]`.
        tis_coef: cap of the importance weights; None records no `weight_*`.
    """
    policies = batch["old_logprobs"], batch["logprobs"], batch["loss_mask"]
    metrics = off_policy_metrics(*policies)
    if tis_coef is not None:
        weights = weight_metrics(importance_weights(*policies, upper=tis_coef), batch["loss_mask"])
        metrics |= {f"weight_{key}": value for key, value in weights.items()}
    with stats_tracker.scope("off_policy"):
        stats_tracker.scalar(**{key: value.item() for key, value in metrics.items()})


class Critic:
    """A model that predicts returns, and learns from the observed returns.

    Args:
        options: the run's config.
        engines: take turns on the device.
        engine: holds the critic.
    """

    def __init__(self, options: PpoConfig, engines: Engines, engine: RliteTrainEngine) -> None:
        self._engines, self._engine = engines, engine
        self._num_updates = options.actor.update_per_rollout
        self._longest = options.inference_length(options.critic)
        self._loss = ValueLoss(
            clip=options.critic.clip,
            avg_level=options.critic.as_model(options.actor).avg_level,
            max_new_tokens=options.rollout.train_sampling_params.max_new_tokens,
        )

    @stats_tracker.record_timing("values")
    def with_values(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `values` [N, L], for each token the value of the state before it."""
        self._engines.move_to_device(self._engine)
        return with_keys(batch, values=self._engine.forward(batch, own_values, self._longest))

    @stats_tracker.record_timing("update_critic")
    def update(self, batch: TensorDict) -> None:
        """Make the optimizer steps of one rollout batch."""
        self._engines.move_to_device(self._engine)
        self._engine.train()
        for rows in torch.arange(len(batch)).tensor_split(min(self._num_updates, len(batch))):
            stats = self._engine.train_batch(batch[rows], self._loss, self._loss.weight)
            self._engine.step_lr_scheduler()
            with stats_tracker.scope("critic"):
                stats_tracker.scalar(**loss_stats(stats))


class KlCoefficient:
    """The weight of the KL. With `kl.adaptive_target` it follows the KL that each step measures."""

    def __init__(self, options: KlOptions) -> None:
        self.coef = options.coef
        self._options = options

    def adapt(self, kl: float | None, num_sequences: int) -> dict[str, float]:
        """Adapt the weight after a step, if there is a target.

        Args:
            kl: mean KL of a token in this step; None if the step measured none.
            num_sequences: sequences in the step.

        Returns:
            The metric `kl_coef`, the weight that the step had; {} without a target.
        """
        target, used = self._options.adaptive_target, self.coef
        if target is None or self._options.type is None:
            return {}
        if kl is not None:
            horizon = self._options.adaptive_horizon
            self.coef = adaptive_kl_coef(used, kl, target=target, horizon=horizon, num_steps=num_sequences)
        return {"kl_coef": used}

    def state_dict(self) -> dict[str, float]:
        """Return the weight, to resume from."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a saved weight if there is a target; otherwise the weight is this run's option."""
        if self._options.adaptive_target is not None:
            self.coef = state.get("coef", self.coef)


def with_selected(
    batch: TensorDict, engine: RliteTrainEngine, loss: PolicyLoss, longest: int | None = None
) -> TensorDict:
    """Return the batch of one update with `selected` [N, L], if the loss treats tokens differently.

    The statistics are those of the whole batch, so that microbatches and ranks do not matter. They cost one more
    forward pass of the policy before each update.

    Args:
        batch: the batch of one update.
        engine: holds the policy.
        loss: chooses tokens, or treats all alike.
        longest: tokens per microbatch of the forward pass; None is the engine's default.
    """
    if not is_selective(loss.configured):
        return batch
    logprobs = engine.forward(batch, OwnLogprobs(temperature=loss.temperature), longest)
    counted = batch["loss_mask"].bool().clone()
    counted[:, 0] = False  # nothing predicts the first token of a row
    return with_keys(batch, selected=loss.select({**batch, "loss_mask": counted}, logprobs))
