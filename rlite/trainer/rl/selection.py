"""Tokens that a policy loss treats differently, chosen over the whole batch of an update. Most losses choose none."""

from __future__ import annotations

from tensordict import TensorDict

from rlite.algorithms import is_selective
from rlite.batch import with_keys
from rlite.engine.train import RliteTrainEngine
from rlite.trainer.losses import OwnLogprobs, PolicyLoss


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
    if not is_selective(loss.policy_loss):
        return batch
    logprobs = engine.forward(batch, OwnLogprobs(temperature=loss.temperature), longest)
    counted = batch["loss_mask"].bool().clone()
    counted[:, 0] = False  # nothing predicts the first token of a row
    return with_keys(batch, selected=loss.select({**batch, "loss_mask": counted}, logprobs))
