"""Rewards of whole groups: the completions of a prompt are scored by one call with lists."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlite.rollout.episode import Episode, current_episode
from rlite.rollout.rewards.function import RewardFunction


@dataclass(eq=False)
class _Gathered:
    """Calls of the episodes of one group."""

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    """keyword arguments of the latest call of each episode, by the number of the episode"""
    waiting: dict[int, asyncio.Future[float]] = field(default_factory=dict)
    """rewards that episodes wait for, by the number of the episode"""


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
        self._groups: weakref.WeakKeyDictionary[Episode, _Gathered] = weakref.WeakKeyDictionary()

    async def _compute(self, keywords: dict[str, Any]) -> float:
        episode = current_episode()
        siblings: Sequence[Episode] = () if episode is None else episode.siblings
        if episode is None or len(siblings) < 2:
            [reward] = await self._compute_batch([keywords])
            return reward
        group, number = self._groups.setdefault(siblings[0], _Gathered()), siblings.index(episode)
        group.rows[number] = keywords
        reward = group.waiting[number] = asyncio.get_running_loop().create_future()
        try:
            if len(group.rows) == len(siblings):
                await self._score(group)
            return await reward
        finally:
            group.waiting.pop(number, None)

    async def _score(self, group: _Gathered) -> None:
        """Give all episodes that wait their rewards, or the error: each of them then calls again, or fails for good."""
        numbers, waiting = sorted(group.rows), dict(group.waiting)
        try:
            rewards = await self._compute_batch([group.rows[number] for number in numbers])
        except Exception as error:
            group.rows.clear()
            for reward in (one for one in waiting.values() if not one.done()):
                reward.set_exception(error)
            return
        for number, value in zip(numbers, rewards, strict=True):
            if number in waiting and not waiting[number].done():
                waiting[number].set_result(value)
