"""The critic, and the adaptive weight of the KL."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict

from rlite.algorithms import adaptive_kl_coef
from rlite.data.packs import with_keys
from rlite.data.routing import ROUTED
from rlite.engine.train import RliteTrainEngine
from rlite.observability import stats_tracker
from rlite.trainer.losses import ValueLoss, own_values
from rlite.trainer.rl.engines import Engines
from rlite.trainer.rl.options import ActorOptions, CriticOptions, KlOptions
from rlite.trainer.run.training_run import loss_stats


class Critic:
    """A model that predicts returns, and learns from the observed returns.

    Args:
        engines: take turns on the device.
        engine: holds the critic.
        options: options of the critic.
        actor: options of the actor, which complete them.
        length: tokens of the longest answer.
    """

    def __init__(
        self, engines: Engines, engine: RliteTrainEngine, options: CriticOptions, actor: ActorOptions, length: int
    ) -> None:
        self._engines, self._engine, self._num_updates = engines, engine, actor.update_per_rollout
        self._longest = options.inference_length(actor)
        level = options.as_model(actor).avg_level
        self._loss = ValueLoss(clip=options.clip, avg_level=level, max_new_tokens=length)

    @stats_tracker.record_timing("values")
    def with_values(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `values` [N, L], for each token the value of the state before it."""
        self._engines.move_to_device(self._engine)
        own = batch.exclude(ROUTED, "teacher_hidden")
        return with_keys(batch, values=self._engine.forward(own, own_values, self._longest))

    @stats_tracker.record_timing("update_critic")
    def update(self, batch: TensorDict) -> None:
        """Make the optimizer steps of one rollout batch."""
        self._engines.move_to_device(self._engine)
        self._engine.train()
        for rows in torch.arange(len(batch)).tensor_split(min(self._num_updates, len(batch))):
            own = batch.exclude(ROUTED, "teacher_hidden")[rows]
            stats = self._engine.train_batch(own, self._loss, self._loss.weight)
            self._engine.step_lr_scheduler()
            with stats_tracker.scope("critic"):
                stats_tracker.scalar(**loss_stats(stats))


class KlCoefficient:
    """The weight of the KL. With `kl.adaptive_target` it follows the KL that each step measures."""

    def __init__(self, options: KlOptions) -> None:
        self.coef = options.coef
        self.is_adaptive = options.adaptive_target is not None and options.type is not None
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
