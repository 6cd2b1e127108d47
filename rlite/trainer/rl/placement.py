"""The devices of a reinforcement-learning trainer's engines, and what its inference executor must offer.

If training rollouts truncate (top_p, top_k), the policy is trained over the ids that were kept.
"""

from __future__ import annotations

from collections.abc import Collection

from tensordict import TensorDict

from rlite.errors import ConfigError, DataError
from rlite.rollout import RolloutWorkflow
from rlite.trainer.options import TrainerOptions
from rlite.trainer.rl.options import RolloutOptions

REMEDY = "sample with top_p=1 and top_k=0"


def check_engine(rollout: RolloutOptions, extras: Collection[str]) -> None:
    """Refuse truncated training rollouts if the inference executor does not return the kept ids.

    Args:
        rollout: options of the rollouts.
        extras: names of the columns that the executor offers.

    Raises:
        ConfigError: the executor does not return them.
    """
    if truncation(rollout) and "kept_ids" not in extras:
        raise ConfigError(
            f"rollout.train_sampling_params truncates ({truncation(rollout)}), and rollout.executor={rollout.executor} "
            "does not return the token ids that it kept, so the sampled distribution could not be trained on; "
            f"{REMEDY}, or with rollout.executor=torch"
        )


def check_kept(batch: TensorDict, rollout: RolloutOptions, workflow: RolloutWorkflow) -> None:
    """Refuse rollouts that were truncated but lack the kept ids.

    Args:
        batch: a batch of the workflow.
        rollout: options of the rollouts.
        workflow: made the batch.

    Raises:
        DataError: the batch has no `kept_ids`.
    """
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


def without_evaluation(world: int, trainer: TrainerOptions, tp_size: int) -> tuple[int, int]:
    """Return the number of devices that train and generate, and of devices that only evaluate.

    Raises:
        ConfigError: The devices cannot be divided so.
    """
    if trainer.evaluate != "beside":
        return world, 0
    evaluating = trainer.evaluation_devices or tp_size
    if evaluating % tp_size:
        raise ConfigError(f"trainer.evaluation_devices={evaluating}: rollout.tp_size={tp_size} does not divide it")
    if evaluating >= world:
        raise ConfigError(
            f"trainer.evaluate=beside: evaluations need devices of their own, {evaluating} of them, and there are "
            f"{world} in all. Give more (num_devices=2 launcher=ray), or let training wait (trainer.evaluate=in_turns)"
        )
    return world - evaluating, evaluating


def divide_devices(world: int, rollout: RolloutOptions) -> tuple[int, int]:
    """Return the number of devices that train, and of devices that generate: all do both, unless rollouts run ahead.

    Raises:
        ConfigError: The devices cannot be divided so.
    """
    generating = world
    if rollout.max_head_offpolicyness:
        generating = rollout.num_devices or max(world // 2 // rollout.tp_size, 1) * rollout.tp_size
        if not 0 < generating < world:
            raise ConfigError(
                f"rollout.max_head_offpolicyness={rollout.max_head_offpolicyness}: rollouts that run beside training "
                f"need devices of their own, {generating} of them, and there are {world} in all. Give more "
                "(num_devices=2 launcher=ray), or let them take turns (rollout.max_head_offpolicyness=0)"
            )
    if generating % rollout.tp_size:
        raise ConfigError(f"rollout.tp_size={rollout.tp_size} does not divide {generating} devices for generation")
    return world if generating == world else world - generating, generating
