"""The critic of PPO: values of what the model has read and written so far. Without one there is `NoCritic`."""

from __future__ import annotations

from typing import Protocol

import torch
from tensordict import TensorDict

from rlite.engine.train import RliteTrainEngine
from rlite.observability import stats_tracker
from rlite.trainer.losses import ValueLoss, own_values
from rlite.trainer.rl.config import PpoConfig
from rlite.trainer.rl.engines import Engines


class AnyCritic(Protocol):
    """What the trainer's loop asks of a critic."""

    def with_values(self, batch: TensorDict) -> TensorDict: ...

    def update(self, batch: TensorDict) -> None: ...


class NoCritic:
    """Advantages need no values."""

    def with_values(self, batch: TensorDict) -> TensorDict:
        return batch

    def update(self, batch: TensorDict) -> None:
        pass


class Critic:
    """Says what it expects, and learns what came of it."""

    def __init__(self, options: PpoConfig, engines: Engines, engine: RliteTrainEngine) -> None:
        model = options.critic.as_model(options.actor)
        self._engines, self._engine = engines, engine
        self._longest = options.inference_length(options.critic)
        self._num_updates = options.actor.update_per_rollout
        self._loss = ValueLoss(
            clip=options.critic.clip,
            avg_level=model.avg_level,
            max_new_tokens=options.rollout.train_sampling_params.max_new_tokens,
        )

    @stats_tracker.record_timing("values")
    def with_values(self, batch: TensorDict) -> TensorDict:
        """Add `values` [N, L], at each token that of the state in which it was chosen."""
        self._engines.bring(self._engine)
        batch["values"] = self._engine.forward(batch, own_values, self._longest)
        return batch

    @stats_tracker.record_timing("update_critic")
    def update(self, batch: TensorDict) -> None:
        """The optimizer steps of one rollout batch."""
        self._engines.bring(self._engine)
        self._engine.train()
        for rows in torch.arange(len(batch)).tensor_split(min(self._num_updates, len(batch))):
            stats = self._engine.train_batch(batch[rows], self._loss, self._loss.weight)
            self._engine.step_lr_scheduler()
            with stats_tracker.scope("critic"):
                stats_tracker.scalar(**stats)


def find_critic(options: PpoConfig, engines: Engines) -> AnyCritic:
    """The one that the engines have, or none."""
    return NoCritic() if engines.critic is None else Critic(options, engines, engines.critic)
