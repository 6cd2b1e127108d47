"""Tokens that a policy loss treats apart, chosen over the whole batch of an update. Most losses choose none."""

from __future__ import annotations

from typing import Protocol

from tensordict import TensorDict

from rlite.algorithms import is_selective
from rlite.engine.train import RliteTrainEngine
from rlite.trainer.losses import OwnLogprobs, PolicyLoss
from rlite.trainer.rl.config import PpoConfig


class AnySelection(Protocol):
    """What the trainer's loop asks before an update."""

    def with_selected(self, batch: TensorDict) -> TensorDict: ...


class NoSelection:
    """The loss treats all tokens alike."""

    def with_selected(self, batch: TensorDict) -> TensorDict:
        return batch


class Selection:
    """Choices by statistics of the batch, whatever microbatches and ranks it is split into.

    They take another forward pass of the policy as it is before each update.
    """

    def __init__(self, engine: RliteTrainEngine, loss: PolicyLoss, longest: int | None = None) -> None:
        self._engine, self._loss, self._longest = engine, loss, longest
        self._hook = OwnLogprobs(temperature=loss.temperature)

    def with_selected(self, batch: TensorDict) -> TensorDict:
        """Add `selected` [N, L] for the batch of one update."""
        logprobs = self._engine.forward(batch, self._hook, self._longest)
        counted = batch["loss_mask"].bool().clone()
        counted[:, 0] = False  # nothing predicts the first token of a row
        batch["selected"] = self._loss.select({**batch, "loss_mask": counted}, logprobs)
        return batch


def make_selection(options: PpoConfig, engine: RliteTrainEngine, loss: PolicyLoss) -> AnySelection:
    """Return what the loss needs."""
    return Selection(engine, loss, options.inference_length()) if is_selective(loss.policy_loss) else NoSelection()
