"""Rewards of whole groups: the completions of a prompt are scored by one call with lists."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlite.rollout.episode import Episode, current_episode
from rlite.rollout.rewards.function import RewardFunction

Row = dict[str, Any]
"""keyword arguments of a call"""


@dataclass(eq=False)
class _Gathered:
    """Calls of the episodes of one group, by the number of the episode."""

    rows: dict[int, Row] = field(default_factory=dict)
    """the latest call of each episode"""
    waiting: dict[int, asyncio.Future[float]] = field(default_factory=dict)
    """rewards that episodes wait for"""


class Gathering:
    """Gathers the calls of the episodes of a group. An episode without siblings is scored alone."""

    def __init__(self, score: Callable[[Sequence[Row]], Awaitable[Sequence[float]]]) -> None:
        self._score = score
        self._groups: weakref.WeakKeyDictionary[Episode, _Gathered] = weakref.WeakKeyDictionary()

    async def result(self, row: Row) -> float:
        """Return the reward of one call, as soon as all siblings of the current episode have made theirs."""
        episode = current_episode()
        siblings: Sequence[Episode] = () if episode is None else episode.siblings
        if episode is None or len(siblings) < 2:
            [reward] = await self._score([row])
            return reward
        group, number = self._groups.setdefault(siblings[0], _Gathered()), siblings.index(episode)
        group.rows[number] = row
        result = group.waiting[number] = asyncio.get_running_loop().create_future()
        try:
            if len(group.rows) == len(siblings):
                await self._settle(group)
            return await result
        finally:
            group.waiting.pop(number, None)

    async def _settle(self, group: _Gathered) -> None:
        """Give all episodes that wait their rewards, or the error: each of them then calls again, or fails for good."""
        numbers, waiting = sorted(group.rows), dict(group.waiting)
        try:
            rewards = await self._score([group.rows[number] for number in numbers])
        except Exception as error:
            group.rows.clear()
            for result in (one for one in waiting.values() if not one.done()):
                result.set_exception(error)
            return
        for number, reward in zip(numbers, rewards, strict=True):
            if number in waiting and not waiting[number].done():
                waiting[number].set_result(reward)


class GroupReward(RewardFunction):
    """A reward function that compares the completions of a group: it is called once with lists of all of them.

    Each call of an episode waits until its siblings have called, too. The function then takes a list in place of each
    argument, in the order of the episodes, and returns a list of rewards, as functions with TRL's signature do
    (`from_trl`). If the call fails, it fails for all siblings, whose attempts may then be repeated. An episode without
    siblings, such as an episode of an evaluation, is scored by a call with lists of one.

    The arguments are those of `RewardFunction`. `timeout` is the time of one call, which scores the whole group.
    """

    def __init__(self, /, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._gathering = Gathering(self._compute_batch)

    async def _compute(self, keywords: dict[str, Any]) -> float:
        return await self._gathering.result(keywords)
