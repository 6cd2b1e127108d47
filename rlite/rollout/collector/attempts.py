"""The episodes of one group: they run side by side, and each is attempted until it succeeds or has no attempt left.

An attempt gets the answers that earlier attempts have drawn (`draws.py`). Its deadline does not depend on its code:
code that ignores its cancellation is abandoned, which ends its episode (`rlite.rollout.deadlines`).
"""

from __future__ import annotations

import inspect
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from rlite.errors import CallTimeout, ConfigError, DataError, DivergedError, ResidencyError, WorkerError
from rlite.rollout.collector.draws import Draws
from rlite.rollout.collector.group import Group
from rlite.rollout.collector.lost_groups import reason_of
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.seeds import SampleInference
from rlite.rollout.deadlines import Abandoned, Overdue, by_deadline, side_by_side
from rlite.rollout.episode import running
from rlite.rollout.trajectories import check_alike, check_trajectory
from rlite.sandbox.child import text_of
from rlite.sandbox.errors import SandboxError
from rlite.types import AsyncInference

FINAL = (DataError, ConfigError)
"""errors that another attempt would repeat"""
ENGINE_FAILURES = (WorkerError, ResidencyError, DivergedError)
"""errors of the engine, which a workflow cannot fix"""


class EpisodeFailed(Exception):
    """The last error of an episode that has no attempt left."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(text_of(error))
        self.error = error


@dataclass(frozen=True)
class Episodes:
    """The episodes of a group.

    With a seed, random numbers depend only on the seed, the episode's number in its group and the turn. For a request
    with a seed of its own they depend on this seed and the episode's number.
    """

    group: Group
    """group of the episodes; its `tokens` count the tokens that each episode has generated so far"""
    engine: AsyncInference
    options: CollectorOptions
    """time-out and number of attempts"""
    failed_attempts: Counter[str]
    """counts the attempts that raised, by the exception's name or the reward's outcome"""

    @property
    def name(self) -> str:
        """Name of the workflow."""
        return type(self.group.workflow).__name__

    async def run(self) -> list[TensorDict] | None:
        """Run all episodes. The first that fails for good cancels its siblings.

        Returns:
            One checked trajectory per episode; None if the workflow returned None for one of them.

        Raises:
            EpisodeFailed: An episode has no attempt left, or the episodes do not fit into one batch.
            WorkerError: The engine cannot serve.
            ResidencyError: The engine cannot serve.
            DivergedError: The engine's weights are not finite.
        """
        affinity = uuid.uuid4().hex if self.group.size > 1 else None
        attempts = [self._attempt_until_success(number, affinity) for number in range(self.group.size)]
        found = [await attempts[0]] if len(attempts) == 1 else await side_by_side(attempts)
        trajectories = [trajectory for trajectory in found if trajectory is not None]
        if len(trajectories) < self.group.size:
            return None
        try:
            if len(trajectories) > 1:
                check_alike(trajectories)
        except DataError as error:
            raise EpisodeFailed(error) from error
        return trajectories

    async def _attempt_until_success(self, number: int, affinity: str | None) -> TensorDict | None:
        group, recorded, draws = self.group, self.group.episodes[number], Draws()
        with running(recorded):
            while True:
                recorded.begin_attempt()
                draws.begin_attempt()
                inference = SampleInference(self.engine, group, number, draws, affinity, self.options.keep_ended)
                try:
                    result = await self._attempt(inference)
                except ENGINE_FAILURES:
                    raise
                except Exception as error:
                    kind = error.outcome if isinstance(error, SandboxError) else type(error).__name__
                    recorded.failed_attempts.append(kind)
                    self.failed_attempts[kind] += 1
                    is_final = isinstance(error, FINAL) or isinstance(error.__cause__, Abandoned)
                    if len(recorded.failed_attempts) > self.options.request_retries or is_final:
                        recorded.failure = reason_of(error)
                        raise EpisodeFailed(error) from error
                else:
                    group.num_finished += 1
                    if draws.are_other(self.engine.get_version()):
                        recorded.redrawn = recorded.failed_attempts[-1]
                    recorded.take_trajectory(result)
                    return result
                finally:
                    inference.end()

    async def _attempt(self, inference: SampleInference) -> TensorDict | None:
        """Return the checked trajectory of one attempt.

        Raises:
            CallTimeout: The attempt did not end in time.
        """
        what = f"an episode of {self.name}"
        try:
            result = await by_deadline(self._episode(inference), self.options.request_timeout, what)
        except Overdue as error:
            raise CallTimeout(str(error)) from error
        if result is not None:
            check_trajectory(result, f"the trajectory of {self.name}")
        return result

    async def _episode(self, inference: Any) -> TensorDict | None:
        episode = self.group.workflow.arun_episode(inference, dict(self.group.data))
        if not inspect.isawaitable(episode):
            raise ConfigError(f"{self.name}.arun_episode returned {episode!r:.100}: write `async def arun_episode`")
        return await episode
