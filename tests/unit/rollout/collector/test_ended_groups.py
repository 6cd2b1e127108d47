"""The collector keeps each group that has ended once, also over a restart."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tensordict import TensorDict

from rlite.errors import CallTimeout, EngineAborted, RolloutError, WorkerDied
from rlite.rollout import (
    CollectorOptions,
    LLMRequest,
    RewardFunction,
    RolloutCollector,
    RolloutWorkflow,
    ScriptedEngine,
    trajectory,
)
from rlite.rollout.collector.ended import Ended, seconds
from rlite.rollout.collector.lost_groups import (
    CANCELLED,
    NOT_ACCEPTED,
    RETURNED_NONE,
    STOPPED,
    TOO_OLD,
    Loss,
    held_up,
    kind_of,
)
from rlite.rollout.episode import current_episode
from rlite.rollout.failures import RewardCrash, RewardMemory, RewardRaised, RewardTimeout


class Ask(RolloutWorkflow):
    """One answer, whose reward is the item's; an item may ask for a failure."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict | None:
        if data.get("does") == "raise":
            raise ValueError("wrong\nitem")
        if data.get("does") == "refuse":
            return None
        response = await engine.agenerate(LLMRequest(input_ids=[1, 2]))
        if data.get("does") == "hang":
            await asyncio.sleep(600)
        return trajectory(response, reward=float(data.get("reward", 0)))


Make = Callable[..., RolloutCollector]


@pytest.fixture
def collector() -> Iterator[Make]:
    made = []

    def make(version: int = 0, **options: Any) -> RolloutCollector:
        options = {"keep_ended": True, "request_retries": 0, **options}
        made.append(RolloutCollector(ScriptedEngine([[7, 8]], version=version), CollectorOptions(**options)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def outcome(groups: list[Ended]) -> list[tuple[str, str | None, str]]:
    return [(group.item, group.status, group.reason.partition(":")[0]) for group in groups]


class FlakyTool(RolloutWorkflow):
    """The first attempt is judged and then fails; the second names no answer."""

    def __init__(self) -> None:
        self.num_attempts = 0
        self.reward = RewardFunction(lambda completions, **_: {"score": 0.0, "answer": completions}, in_process=True)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        response = await engine.agenerate(LLMRequest(input_ids=[1, 2]))
        self.num_attempts += 1
        if self.num_attempts == 1:
            await self.reward("?", "41", [1], [2])
            raise ValueError("a tool failed")
        return trajectory(response, reward=1.0)


def test_the_answer_of_a_failed_attempt_is_not_kept(collector: Make) -> None:
    rollouts = collector(request_retries=1)
    rollouts.collect([{}], FlakyTool(), group_size=1)
    [group] = rollouts.take_ended()
    assert [episode.answer for episode in group.episodes] == [None]
    assert group.episodes[0].trajectory is not None


def test_each_group_is_kept_once_with_its_item_and_reason(collector: Make) -> None:
    rollouts = collector(request_timeout=0.2)
    items = [{"id": "a"}, {"does": "raise"}, {"id": 7, "does": "refuse"}, {"id": "d", "does": "hang"}]
    rollouts.collect(items, Ask(), group_size=2)
    found = sorted(rollouts.take_ended(), key=lambda group: group.group)
    assert outcome(found) == [
        ("a", None, ""),
        ("1", "failed", "ValueError"),
        ("7", "refused", "the workflow returned None"),
        ("d", "timed_out", "CallTimeout"),
    ]
    finished = found[0].episodes
    assert all(len(episode.spans) == 1 and episode.ended is not None for episode in finished)
    assert [episode.trajectory is not None for episode in finished] == [True, True]
    written = [[one["ids"].tolist() for one in group.episodes[0].attempt.arrays()] for group in found]
    assert written == [[], [], [], [[1, 2, 7, 8]]], "without a trajectory, what was written so far is kept"
    assert rollouts.take_ended() == []


def test_nothing_is_kept_unless_asked(collector: Make) -> None:
    rollouts = collector(keep_ended=False)
    rollouts.collect([{}, {"does": "refuse"}], Ask())
    assert rollouts.take_ended() == []


def test_episodes_of_a_group_go_without_a_garbage_collection(collector: Make) -> None:
    seen = []

    class Seen(Ask):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict | None:
            seen.append(weakref.ref(current_episode()))
            return await super().arun_episode(engine, data)

    rollouts = collector(keep_ended=False)
    gc.disable()
    try:
        rollouts.collect([{}] * 8, Seen())
        until = time.monotonic() + 5
        while any(each() for each in seen) and time.monotonic() < until:  # the loop's thread may still end a task
            time.sleep(0.01)
        assert [each() for each in seen] == [None] * 8
    finally:
        gc.enable()


@pytest.mark.parametrize("keeps", [True, False])
def test_tokens_are_kept_only_for_a_record(collector: Make, keeps: bool) -> None:
    episodes = []

    class Seen(Ask):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict | None:
            await super().arun_episode(engine, data)
            episodes.append(current_episode())
            return None

    collector(keep_ended=keeps).collect([{}], Seen())
    [episode] = episodes
    assert episode is not None
    assert [len(columns["ids"]) for columns in episode.attempt.arrays()] == ([4] if keeps else [])


def test_refused_and_too_old_groups_keep_their_trajectories(collector: Make) -> None:
    rollouts = collector(max_head_offpolicyness=1, consumer_batch_size=1)
    rollouts.submit({"id": "good", "reward": 1}, Ask(), should_accept=lambda group: False)
    for _ in range(2):
        rollouts.submit({"id": "old"}, Ask())
    rollouts.wait(1, timeout=30)
    rollouts._runner.wait_until(lambda: rollouts.counters.ready == 1, None)
    rollouts.engine.set_version(3)  # type: ignore[attr-defined]
    rollouts.version_changed()
    rollouts.submit({"id": "new"}, Ask())
    rollouts.wait(1, timeout=30)
    found = rollouts.take_ended()
    assert outcome(found) == [
        ("good", "refused", NOT_ACCEPTED.reason),
        ("old", None, ""),
        ("old", "too_old", TOO_OLD.reason),
        ("new", None, ""),
    ]
    assert all(episode.trajectory is not None for group in found for episode in group.episodes)


def test_a_restart_keeps_what_was_not_taken_and_repeats_nothing(collector: Make) -> None:
    rollouts = collector(max_head_offpolicyness=1, consumer_batch_size=1)
    rollouts.submit({"id": "taken"}, Ask())
    rollouts.wait(1, timeout=30)
    assert [group.item for group in rollouts.take_ended()] == ["taken"]
    rollouts.submit({"id": "lost", "does": "refuse"}, Ask())
    rollouts.submit({"id": "ready", "reward": 3}, Ask())
    rollouts._runner.wait_until(lambda: rollouts.counters.ready == 1, None)
    state = rollouts.state_dict()
    again = collector(max_head_offpolicyness=1, consumer_batch_size=1)
    again.load_state_dict(state, Ask())
    again.wait(1, timeout=30)
    lost, ready = again.take_ended()
    assert outcome([lost, ready]) == [("lost", "refused", "the workflow returned None"), ("ready", None, "")]
    assert ready.episodes[0].trajectory is not None
    assert ready.episodes[0].trajectory["rewards"].tolist() == [3.0]
    assert seconds(ready.episodes[0], "generate") > 0
    assert (lost.group, ready.group) == (1, 2)


def test_groups_under_way_are_aborted_in_the_record_alone(collector: Make) -> None:
    rollouts = collector(max_head_offpolicyness=1, consumer_batch_size=2)
    rollouts.submit({"id": "ready"}, Ask())
    rollouts._runner.wait_until(lambda: rollouts.counters.ready == 1, None)
    assert outcome(rollouts.take_all("the run ended")) == [("ready", "aborted", "the run ended")]
    assert rollouts.counters.ready == 1


class OutpacedCollector(RolloutCollector):
    """After `take_ended`, another thread drops each group, if it gets the lock."""

    def take_ended(self) -> list[Ended]:
        found = super().take_ended()
        other = threading.Thread(target=self._drop_all)
        other.start()
        other.join()
        return found

    def _drop_all(self) -> None:
        if self._changed.acquire(blocking=False):
            for group in list(self._ahead.groups.values()):
                self._runner.drop(self._ahead, group, CANCELLED)
            self._changed.release()


def test_a_group_that_is_lost_at_the_end_of_a_run_is_recorded() -> None:
    rollouts = OutpacedCollector(
        ScriptedEngine([[7, 8]]), CollectorOptions(keep_ended=True, max_head_offpolicyness=1, consumer_batch_size=2)
    )
    rollouts.submit({"id": "waits", "does": "hang"}, Ask())
    assert outcome(rollouts.take_all("the run ended")) == [("waits", "aborted", "the run ended")]
    rollouts.close()


def test_every_episode_of_an_evaluation_is_there_in_the_order_of_the_data(collector: Make) -> None:
    rollouts = collector()
    found = rollouts.evaluate([{"id": "x"}, {"does": "raise"}], Ask(), group_size=2)
    assert [(one.group, one.first_sample, one.item, one.status) for one in found] == [
        *((0, 0, "x", "evaluated"), (0, 1, "x", "evaluated")),
        *((1, 0, "1", "failed"), (1, 1, "1", "failed")),
    ]
    assert rollouts.take_ended() == [], "nothing of it is trained on"


@pytest.mark.parametrize(
    ("loss", "status"),
    [
        (TOO_OLD, "too_old"),
        (held_up(5), "too_old"),
        (CANCELLED, "aborted"),
        (STOPPED, "aborted"),
        (NOT_ACCEPTED, "refused"),
        (RETURNED_NONE, "refused"),
        (Loss.by(CallTimeout("late")), "timed_out"),
        (Loss.by(RewardTimeout("hung")), "reward_killed"),
        (Loss.by(RewardCrash("died")), "reward_killed"),
        (Loss.by(RewardMemory("big")), "reward_killed"),
        (Loss.by(RewardRaised("bug")), "failed"),
        (Loss.by(EngineAborted("ended")), "aborted"),
        (Loss.by(WorkerDied("gone")), "aborted"),
        (Loss.by(RolloutError("empty")), "failed"),
    ],
)
def test_status_describes_the_end_of_a_group(loss: Loss, status: str) -> None:
    assert loss.status == status
    assert loss.kind == kind_of(loss.reason)
