"""Statistics of a whole batch: distances of policies, and the tokens that a policy loss treats differently."""

from __future__ import annotations

from tensordict import TensorDict

from rlite.algorithms import importance_weights, off_policy_metrics, weight_metrics
from rlite.data.packs import with_keys
from rlite.engine.train import RliteTrainEngine
from rlite.observability import stats_tracker
from rlite.trainer.rl.objective import OwnLogprobs, PolicyLoss


def report_off_policy(batch: TensorDict, tis_coef: float | None) -> None:
    """Record `off_policy/*`: `off_policy_metrics`, and `weight_metrics` of the truncated importance weights.

    `batch`: rollouts with `old_logprobs`, `logprobs` and `loss_mask`, each `[N, L]`. `tis_coef`: cap of the importance
    weights; None records no `weight_*`.
    """
    policies = batch["old_logprobs"], batch["logprobs"], batch["loss_mask"]
    metrics = off_policy_metrics(*policies)
    if tis_coef is not None:
        weights = weight_metrics(importance_weights(*policies, upper=tis_coef), batch["loss_mask"])
        metrics |= {f"weight_{key}": value for key, value in weights.items()}
    with stats_tracker.scope("off_policy"):
        stats_tracker.scalar(**{key: value.item() for key, value in metrics.items()})


def with_selected(
    batch: TensorDict, engine: RliteTrainEngine, loss: PolicyLoss, longest: int | None = None
) -> TensorDict:
    """Return the batch of one update with `selected` [N, L], for a loss that treats tokens differently.

    The statistics are those of the whole batch, so that microbatches and ranks do not matter. They cost one more
    forward pass of the policy before each update.

    `longest`: tokens per microbatch of the forward pass; None is the engine's default.
    """
    hook = OwnLogprobs(temperature=loss.temperature)
    logprobs = engine.forward(batch.exclude("teacher_hidden"), hook, longest)
    counted = batch["loss_mask"].bool().clone()
    counted[:, 0] = False  # nothing predicts the first token of a row
    return with_keys(batch, selected=loss.select({**batch, "loss_mask": counted}, logprobs))
