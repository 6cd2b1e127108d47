"""The critic."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from rlite.data.packs import with_keys
from rlite.data.routing import ROUTED
from rlite.engine.train import RliteTrainEngine
from rlite.observability import stats_tracker
from rlite.trainer.losses import ValueLoss, own_values
from rlite.trainer.rl.engines import Engines
from rlite.trainer.rl.options import ActorOptions, CriticOptions
from rlite.trainer.run.training_run import loss_stats


class Critic:
    """A model that predicts returns, and learns from the observed returns."""

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
