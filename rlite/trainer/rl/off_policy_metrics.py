"""The distance of the trainer's policy from the policy of the inference engine, as metrics."""

from __future__ import annotations

from tensordict import TensorDict

from rlite.algorithms import importance_weights, off_policy_metrics, weight_metrics
from rlite.observability import stats_tracker


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
