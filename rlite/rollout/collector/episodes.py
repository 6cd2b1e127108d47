"""The episodes of one group: attempted side by side, each until it succeeds or its attempts are spent."""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tensordict import TensorDict

from rlite.errors import CallTimeout, ConfigError, DataError, DivergedError, ResidencyError, WorkerError
from rlite.rollout.collector.seeds import SampleInference
from rlite.rollout.rewards.function import RewardError
from rlite.rollout.trajectories import check_trajectory
from rlite.rollout.workflow import RolloutWorkflow
from rlite.sandbox.child import text_of
from rlite.types import AsyncInference

FINAL = (DataError, ConfigError)
"""what a further attempt would meet again"""
ENGINE_FAILURES = (WorkerError, ResidencyError, DivergedError)
"""the engine's own, which no workflow can help"""


class EpisodeFailed(Exception):
    """An episode's last error, when it is not attempted again."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(text_of(error))
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
    tokens: Counter[int] | None = None,
) -> list[TensorDict | None]:
    """`count` episodes of one item; the first that fails for good cancels its siblings.

    `failed_attempts` counts what was raised, by the exception's name or the reward's outcome. With a `seed`, random
    numbers depend on it, the sample and the turn alone; those of requests with a seed of their own on that and the
    sample. `tokens` counts what each sample has generated so far.
    Raises: EpisodeFailed; WorkerError, ResidencyError or DivergedError, at once.
    """

    affinity = uuid.uuid4().hex if count > 1 else None

    async def episode(sample: int) -> TensorDict | None:
        def attempt() -> Awaitable[TensorDict | None]:
            # with a seed, a further attempt is the same again, unless what failed was not the model's doing
            return workflow.arun_episode(SampleInference(engine, sample, seed, tokens, affinity), dict(data))

        return await _until_it_succeeds(attempt, type(workflow).__name__, timeout, retries, failed_attempts)

    if count == 1:
        return [await episode(0)]
    try:
        async with asyncio.TaskGroup() as siblings:
            tasks = [siblings.create_task(episode(sample)) for sample in range(count)]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _until_it_succeeds(
    attempt: Callable[[], Awaitable[TensorDict | None]],
    name: str,
    timeout: float,
    retries: int,
    failed_attempts: Counter[str],
) -> TensorDict | None:
    attempts = 0
    while True:
        attempts += 1
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                episode = attempt()
                if not inspect.isawaitable(episode):
                    raise ConfigError(f"{name}.arun_episode returned {episode!r:.100}: write `async def arun_episode`")
                result = await episode
            if result is not None:
                check_trajectory(result, f"the trajectory of {name}")
            return result
        except ENGINE_FAILURES:
            raise
        except Exception as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from error  # the workflow has made another error of it
            cause: Exception = error
            if isinstance(error, TimeoutError) and limit.expired():
                cause = CallTimeout(f"an episode of {name} did not end in {timeout:g} s")
            failed_attempts[cause.outcome if isinstance(cause, RewardError) else type(cause).__name__] += 1
            if attempts > retries or isinstance(cause, FINAL):
                raise EpisodeFailed(cause) from cause
