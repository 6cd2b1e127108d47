"""The episodes of one group: attempted side by side, each until it succeeds or its attempts are spent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict

from rlite.errors import CallTimeout, ConfigError, DataError, ResidencyError, WorkerError
from rlite.rollout.batch import check_trajectory
from rlite.rollout.rewards import RewardError
from rlite.rollout.seeds import SeededInference, mix
from rlite.rollout.workflow import RolloutWorkflow
from rlite.types import AsyncInference

FINAL = (DataError, ConfigError)
"""what a further attempt would meet again"""
ENGINE_FAILURES = (WorkerError, ResidencyError)
"""the engine's own, which no workflow can help"""


class EpisodeFailed(Exception):
    """An episode's last error, when it is not attempted again."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


async def run_episodes(
    workflow: RolloutWorkflow,
    engine: AsyncInference,
    data: Mapping[str, Any],
    count: int,
    *,
    timeout: float,
    retries: int,
    failed_attempts: Counter[str],
    seed: int | None = None,
) -> list[TensorDict | None]:
    """`count` episodes of one item; the first that fails for good cancels its siblings.

    `failed_attempts` counts what was raised, by the exception's name or the reward's outcome. With a `seed`, random
    numbers depend on it, the sample and the turn alone.
    Raises: EpisodeFailed; WorkerError or ResidencyError, at once.
    """

    async def episode(sample: int) -> TensorDict | None:
        episode_seed = None if seed is None else mix(seed, sample)
        return await _until_it_succeeds(workflow, engine, data, timeout, retries, failed_attempts, episode_seed)

    if count == 1:
        return [await episode(0)]
    try:
        async with asyncio.TaskGroup() as siblings:
            tasks = [siblings.create_task(episode(sample)) for sample in range(count)]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _until_it_succeeds(
    workflow: RolloutWorkflow,
    engine: AsyncInference,
    data: Mapping[str, Any],
    timeout: float,
    retries: int,
    failed_attempts: Counter[str],
    seed: int | None,
) -> TensorDict | None:
    attempts = 0
    while True:
        attempts += 1
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                # a further attempt is the same again, unless what failed was not the model's doing
                own = engine if seed is None else SeededInference(engine, seed)
                result = await workflow.arun_episode(own, dict(data))
            if result is not None:
                check_trajectory(result, f"the trajectory of {type(workflow).__name__}")
            return result
        except ENGINE_FAILURES:
            raise
        except Exception as error:
            cause: Exception = error
            if isinstance(error, TimeoutError) and limit.expired():
                cause = CallTimeout(f"an episode of {type(workflow).__name__} did not end in {timeout:g} s")
            failed_attempts[cause.outcome if isinstance(cause, RewardError) else type(cause).__name__] += 1
            if attempts > retries or isinstance(cause, FINAL):
                raise EpisodeFailed(cause) from cause
