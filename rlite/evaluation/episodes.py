"""Episodes of an evaluation: each is returned as soon as it ends, so that no ended episode can be lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rlite.rollout import RolloutWorkflow
from rlite.rollout.collector.attempts import EpisodeFailed, Episodes
from rlite.rollout.collector.group import Group
from rlite.rollout.collector.lost_groups import CANCELLED, RETURNED_NONE, reason_of
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.seeds import mix
from rlite.rollout.deadlines import side_by_side
from rlite.rollout.loop import LoopThread
from rlite.rollout.workflow import RolloutError
from rlite.types import AsyncInference


@dataclass(frozen=True)
class Place:
    """The place of an episode in an evaluation."""

    item: int
    """number of the item in the data"""
    sample: int
    """number among the samples of the item"""


@dataclass(frozen=True)
class EndedEpisode:
    """An episode that has ended."""

    place: Place
    group: Group
    """holds the episode alone"""
    reason: str = ""
    """why it failed"""
    error: BaseException | None = None
    """the exception behind the reason"""

    @property
    def has_succeeded(self) -> bool:
        """True if there is a trajectory."""
        return self.group.episodes[0].trajectory is not None


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs episodes of a workflow, a bounded number at a time.

    The random numbers of an episode depend on the seed and on its place alone, not on the episodes that ran before.
    """

    engine: AsyncInference
    workflow: RolloutWorkflow
    items: Sequence[Mapping[str, Any]]
    options: CollectorOptions
    """time-out and number of attempts"""
    seed: int
    max_concurrent: int
    """episodes that run at the same time"""

    def run(self, places: Sequence[Place], on_end: Callable[[EndedEpisode], None]) -> None:
        """Run the episodes of these places. The first error of the engine, or of `on_end`, ends all.

        Args:
            places: are started in this order.
            on_end: called for each episode in the order of their ends, one call at a time, in a thread of its own.

        Raises:
            RolloutError: user code has ended the event loop of the episodes.
            CallTimeout: user code blocks the event loop for longer than an episode may take.
        """
        loop = LoopThread("evaluation", lambda _: None, block_limit=self.options.request_timeout)
        taker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evaluation-taker")

        has_failed = False

        def take_unless_failed(ended: EndedEpisode) -> None:
            nonlocal has_failed
            if has_failed:  # waiting episodes are no longer started
                return
            try:
                on_end(ended)
            except BaseException:
                has_failed = True
                raise

        async def take(ended: EndedEpisode) -> None:
            await asyncio.get_running_loop().run_in_executor(taker, take_unless_failed, ended)

        running = loop.submit(self._run_all(iter(places), min(self.max_concurrent, len(places)), take))
        try:
            loop.result(running)
        except CancelledError as error:
            raise RolloutError("the evaluation was stopped: user code has ended the episodes' event loop") from error
        finally:
            running.cancel()
            loop.stop()
            loop.join()
            taker.shutdown()

    async def _run_all(
        self, places: Iterator[Place], count: int, take: Callable[[EndedEpisode], Awaitable[None]]
    ) -> None:
        async def work() -> None:
            for place in places:
                await take(await self._episode(place))

        await side_by_side([work() for _ in range(count)])

    async def _episode(self, place: Place) -> EndedEpisode:
        seed = mix(mix(self.seed, place.item), place.sample)
        group = Group(place.item, self.items[place.item], self.workflow, size=1, seed=seed, first_sample=place.sample)
        try:
            found = await Episodes(group, self.engine, self.options, Counter()).run()
        except EpisodeFailed as failed:
            return EndedEpisode(place, group, reason_of(failed.error), failed.error)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return EndedEpisode(place, group, CANCELLED)  # by the workflow
        return EndedEpisode(place, group, "" if found else RETURNED_NONE)
