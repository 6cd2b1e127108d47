"""Truncated sampling (top_p, top_k) of training rollouts: the policy is then trained over the ids that were kept."""

from __future__ import annotations

from collections.abc import Collection

from tensordict import TensorDict

from rlite.errors import ConfigError, DataError
from rlite.rollout import RolloutWorkflow
from rlite.trainer.rl.options import RolloutOptions

REMEDY = "sample with top_p=1 and top_k=0"


def check_engine(rollout: RolloutOptions, extras: Collection[str]) -> None:
    """Refuse truncated training rollouts if the inference executor does not return the kept ids."""
    if truncation(rollout) and "kept_ids" not in extras:
        raise ConfigError(
            f"rollout.train_sampling_params truncates ({truncation(rollout)}), and rollout.executor={rollout.executor} "
            "does not return the token ids that it kept, so the sampled distribution could not be trained on; "
            f"{REMEDY}, or with rollout.executor=torch"
        )


def check_kept(batch: TensorDict, rollout: RolloutOptions, workflow: RolloutWorkflow) -> None:
    """Refuse rollouts that were truncated but lack the kept ids."""
    if truncation(rollout) and "kept_ids" not in batch:
        raise DataError(
            f"training rollouts truncate ({truncation(rollout)}), and the trajectories of {type(workflow).__name__} "
            "have no kept_ids: its log-probabilities would be those of another distribution. Build trajectories with "
            "trajectory(response) or TokenHistory.add(response), which keep response.extras['kept_ids'], or "
            f"{REMEDY}"
        )


def truncation(rollout: RolloutOptions) -> str:
    """Return how training rollouts truncate; "" if they do not."""
    sampling = rollout.train_sampling_params
    return f"top_p={sampling.top_p:g}, top_k={sampling.top_k}" if sampling.gconfig().is_truncating else ""
