"""Tokens that a policy loss treats differently, chosen over the whole batch of an update. Most losses choose none."""

from __future__ import annotations

from tensordict import TensorDict

from rlite.algorithms import is_selective
from rlite.batch import with_keys
from rlite.engine.train import RliteTrainEngine
from rlite.trainer.losses import OwnLogprobs, PolicyLoss
from rlite.trainer.rl.config import PpoConfig


class NoSelection:
    """No selection: the loss treats all tokens alike."""

    def with_selected(self, batch: TensorDict) -> TensorDict:
        """Return the batch as it is."""
        return batch


class Selection:
    """Chooses tokens by statistics of the whole batch, so that microbatches and ranks do not matter.

    It costs one more forward pass of the policy before each update.

    Args:
        engine: holds the policy.
        loss: chooses.
        longest: tokens per microbatch of the forward pass; None is the engine's default.
    """

    def __init__(self, engine: RliteTrainEngine, loss: PolicyLoss, longest: int | None = None) -> None:
        self._engine, self._loss, self._longest = engine, loss, longest
        self._hook = OwnLogprobs(temperature=loss.temperature)

    def with_selected(self, batch: TensorDict) -> TensorDict:
        """Return the batch of one update with `selected` [N, L]."""
        logprobs = self._engine.forward(batch, self._hook, self._longest)
        counted = batch["loss_mask"].bool().clone()
        counted[:, 0] = False  # nothing predicts the first token of a row
        return with_keys(batch, selected=self._loss.select({**batch, "loss_mask": counted}, logprobs))


def make_selection(options: PpoConfig, engine: RliteTrainEngine, loss: PolicyLoss) -> NoSelection | Selection:
    """Return the selection that the loss needs.

    Args:
        options: the run's config.
        engine: holds the policy.
        loss: chooses tokens, or treats all alike.
    """
    return Selection(engine, loss, options.inference_length()) if is_selective(loss.policy_loss) else NoSelection()
