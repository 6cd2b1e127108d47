"""Division of an episode's time."""

from __future__ import annotations

import asyncio
import time

import pytest

from rlite.rollout import RewardFunction
from rlite.rollout.collector.ended import seconds
from rlite.rollout.collector.saved import episode_state, saved_episode
from rlite.rollout.episode import Episode, current_episode, in_reward, running
from rlite.runtime.sandbox.pool import close_shared_pool


def episode(*spans: tuple[str, float, float]) -> Episode:
    made = Episode(time.monotonic())
    made.spans = list(spans)
    return made


def test_overlapping_spans_count_once() -> None:
    made = episode(("generate", 3.0, 5.0), ("generate", 1.0, 4.0), ("reward", 4.5, 7.0), ("generate", 1.5, 2.0))
    assert seconds(made, "generate") == pytest.approx(4.0)
    assert seconds(made, "reward") == pytest.approx(2.5)
    assert seconds(made, "generate", "reward") == pytest.approx(6.0)
    assert seconds(episode(), "generate") == 0


def test_rewards_count_for_the_episode_of_their_task() -> None:
    first, second = episode(), episode()

    async def run(one: Episode, num_rewards: int) -> None:
        with running(one):
            for _ in range(num_rewards):
                await asyncio.gather(wait(), wait())

    async def wait() -> None:
        with in_reward():
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(run(first, 1), run(second, 2))

    asyncio.run(both())
    assert [len(first.spans), len(second.spans)] == [2, 4]
    assert current_episode() is None


def test_a_reward_cannot_change_the_time_that_it_takes() -> None:
    def slow_and_hostile(completions: str, **row: object) -> float:
        import time

        clock, time.monotonic, time.perf_counter = time.sleep, lambda: 0.0, lambda: 0.0
        clock(0.2)
        return 1.0

    async def run() -> Episode:
        one = episode()
        with running(one):
            reward = RewardFunction(slow_and_hostile)
            assert await reward(prompt="", completions="", prompt_ids=[], completion_ids=[]) == 1
        return one

    found = asyncio.run(run())
    assert 0.2 <= seconds(found, "reward") < 15
    close_shared_pool()


def test_rewards_outside_of_episodes_are_not_counted() -> None:
    with in_reward():
        assert current_episode() is None


def test_an_episode_comes_back_from_its_state() -> None:
    made = episode(("generate", 1.0, 2.0))
    made.started = made.now()
    made.failure, made.answer = "broken", "42"
    made.end()
    back = saved_episode(episode_state(made), None)
    assert episode_state(back) == episode_state(made)
