"""The critic of PPO, which predicts the return of every state."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from rlite.batch import with_keys
from rlite.engine.train import RliteTrainEngine
from rlite.observability import stats_tracker
from rlite.trainer.losses import ValueLoss, own_values
from rlite.trainer.rl.engines import Engines
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.run.training_run import loss_stats


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
