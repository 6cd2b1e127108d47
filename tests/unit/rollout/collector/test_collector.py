from __future__ import annotations

import asyncio
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlite.errors import CallTimeout, CheckpointError, ConfigError, DataError, WorkerDied
from rlite.observability import stats_tracker
from rlite.rollout import (
    CollectorOptions,
    GenerationHyperparameters,
    LLMRequest,
    RolloutCollector,
    RolloutError,
    RolloutWorkflow,
    ScriptedEngine,
    trajectory,
)

GCONFIG = GenerationHyperparameters(max_new_tokens=64)


class Answer(RolloutWorkflow):
    """Generates from the item's number; `before` may raise, wait, or answer with something of its own."""

    def __init__(self, before: Callable[[dict[str, Any]], Any] = lambda data: None) -> None:
        self.before = before

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        early = self.before(data)
        if asyncio.iscoroutine(early):
            early = await early
        if early is not None:
            return None if early is DROP else early
        response = await engine.agenerate(LLMRequest(input_ids=[data["number"] + 1], gconfig=GCONFIG))
        return trajectory(response, reward=float(data["number"]))


DROP = object()


def later_is_faster(request: LLMRequest) -> float:
    return 0.1 / request.input_ids[0]


def items(*numbers: int) -> list[dict[str, int]]:
    return [{"number": number} for number in numbers]


def numbers(batch: TensorDict) -> list[int]:
    return [int(reward) for reward in batch["rewards"]]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda request: [7] * request.input_ids[0], latency=later_is_faster)


@pytest.fixture
def collect(engine: ScriptedEngine) -> Iterator[Callable[..., RolloutCollector]]:
    """Makes collectors with the given options, and closes them."""
    made: list[RolloutCollector] = []

    def make(**options: Any) -> RolloutCollector:
        made.append(RolloutCollector(engine, CollectorOptions(**options)))
        return made[-1]

    yield make
    for collector in made:
        collector.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout-collector"]


Collect = Callable[..., RolloutCollector]


# -- synchronous -----------------------------------------------------------------------------------------------------


def test_a_batch_keeps_the_order_of_its_items_with_siblings_side_by_side(collect: Collect) -> None:
    batch = collect().rollout_batch(items(3, 1, 2), Answer(), group_size=2)
    assert numbers(batch) == [3, 3, 1, 1, 2, 2]
    assert batch["group_ids"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch["attention_mask"].sum(1).tolist() == [5, 5, 3, 3, 4, 4]
    assert batch["versions"][2].tolist() == [-1, 0, 0, -1, -1]


def test_group_ids_of_two_batches_differ(collect: Collect) -> None:
    collector = collect()
    first, second = (collector.rollout_batch(items(1, 2), Answer())["group_ids"].tolist() for _ in range(2))
    assert not set(first) & set(second)


def test_no_more_groups_run_at_a_time_than_allowed(collect: Collect) -> None:
    running, most = 0, 0

    async def count(data: dict[str, Any]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    batch = collect(max_concurrent_rollouts=3).rollout_batch(items(*range(10)), Answer(count))
    assert numbers(batch) == list(range(10))
    assert most == 3


def test_each_attempt_has_its_own_copy_of_the_item(collect: Collect) -> None:
    data = items(1)

    def spoil(item: dict[str, Any]) -> None:
        item["number"] += 1

    assert numbers(collect().rollout_batch(data, Answer(spoil), group_size=3)) == [2, 2, 2]
    assert data == items(1)


# -- failures --------------------------------------------------------------------------------------------------------


def test_an_episode_that_raises_is_attempted_again(collect: Collect) -> None:
    tries = {1: 0, 2: 0}

    def fail_twice(item: dict[str, Any]) -> None:
        tries[item["number"]] += 1
        if item["number"] == 1 and tries[1] < 3:
            raise ConnectionError("reset by peer")

    collector = collect(request_retries=2)
    assert numbers(collector.rollout_batch(items(1, 2), Answer(fail_twice))) == [1, 2]
    assert collector.failed_attempts == {"ConnectionError": 2}
    assert collector.lost == {}


def test_a_group_whose_retries_are_spent_is_dropped_whole_with_a_reason(collect: Collect) -> None:
    calls = 0

    def fail_one_sibling(item: dict[str, Any]) -> None:
        nonlocal calls
        if item["number"] == 1:
            calls += 1
            if calls != 1:
                raise ValueError("no such tool")

    collector = collect(request_retries=1)
    batch = collector.rollout_batch(items(0, 1, 2), Answer(fail_one_sibling), group_size=2)
    assert numbers(batch) == [0, 0, 2, 2]
    assert collector.lost == {"ValueError: no such tool": 1}


class Speechless(Exception):
    def __str__(self) -> str:
        raise AttributeError("status")


def test_an_exception_that_cannot_be_printed_costs_its_group_and_not_the_run(collect: Collect) -> None:
    def fail(item: dict[str, Any]) -> None:
        if item["number"] == 1:
            raise Speechless

    collector = collect(request_retries=0)
    for group_size in (1, 2):
        assert set(numbers(collector.rollout_batch(items(0, 1, 2), Answer(fail), group_size))) == {0, 2}
    assert collector.lost == {"Speechless: <its text cannot be made: AttributeError>": 2}


@pytest.mark.parametrize(
    ("early", "reason"),
    [
        (DROP, "the workflow returned None"),
        ({"input_ids": [1]}, "DataError: the trajectory of Answer is dict: expected a TensorDict"),
        (
            TensorDict(
                {
                    "input_ids": torch.ones(1, 2),
                    "attention_mask": torch.ones(1, 2),
                    "rewards": torch.tensor([float("nan")]),
                },
                batch_size=[1],
            ),
            "rewards holds a value that is not finite",
        ),
    ],
)
def test_invalid_trajectories_are_lost_with_a_reason(collect: Collect, early: Any, reason: str) -> None:
    collector = collect()
    batch = collector.rollout_batch(items(0, 1), Answer(lambda item: early if item["number"] else None))
    assert numbers(batch) == [0]
    assert [reason in lost for lost in collector.lost] == [True]
    assert collector.failed_attempts.total() <= 1, "the same data would only fail again"


def without_versions(number: int) -> TensorDict:
    ones = torch.ones(1, 2, dtype=torch.int64)
    columns = {"input_ids": ones, "attention_mask": ones, "rewards": torch.tensor([float(number)])}
    return TensorDict(columns, batch_size=[1])


def test_trajectories_that_fit_into_no_batch_are_data_with_a_reason(collect: Collect) -> None:
    collector = collect(request_retries=0)
    sometimes = Answer(lambda item: without_versions(item["number"]) if item["number"] == 1 else None)
    assert numbers(collector.rollout_batch(items(3, 2, 0, 1), sometimes)) == [3, 2, 0]
    assert dict(collector.lost) == {
        "unlike the others of its batch in attention_mask, logprobs, loss_mask, truncated, versions": 1
    }
    attempts = iter(range(100))
    siblings = Answer(lambda item: without_versions(0) if item["number"] == 1 and next(attempts) % 2 else None)
    assert numbers(collector.rollout_batch(items(0, 1), siblings, group_size=2)) == [0, 0]
    assert ["trajectory 1" in reason for reason in collector.lost] == [False, True]
    batch = collector.prepare_batch([items(0, 1, 2)], sometimes, timeout=100)
    assert [number != 1 for number in numbers(batch)] == [True] * 3, "it is replaced"


def test_a_workflow_that_always_fails_stops_the_run_with_that_reason(collect: Collect) -> None:
    attempts = 0

    def fail(item: dict[str, Any]) -> None:
        nonlocal attempts
        attempts += 1
        raise ZeroDivisionError("reward of nothing")

    collector = collect(request_retries=1, max_consecutive_failures=4, max_concurrent_rollouts=2)
    with pytest.raises(RolloutError, match="4 groups in a row failed, the last with ZeroDivisionError: reward of"):
        collector.rollout_batch(items(*range(1000)), Answer(fail))
    assert attempts <= 2 * (4 + 2)
    assert numbers(collector.rollout_batch(items(5), Answer())) == [5], "the collector serves on"


def test_a_batch_of_which_nothing_is_left_is_an_error_with_the_first_reason(collect: Collect) -> None:
    with pytest.raises(RolloutError, match="none of 2 groups was finished: KeyError: 'question'"):
        collect(request_retries=0).rollout_batch(items(1, 2), Answer(lambda item: item["question"]))


def test_an_engine_that_cannot_serve_stops_the_run_at_once(collect: Collect) -> None:
    def die(item: dict[str, Any]) -> None:
        raise WorkerDied("worker 0 is gone", ("worker 0",))

    collector = collect()
    with pytest.raises(WorkerDied, match="worker 0 is gone"):
        collector.rollout_batch(items(1, 2, 3), Answer(die))
    assert collector.failed_attempts == {}


def test_the_death_of_the_loop_is_raised_in_its_owner(collect: Collect) -> None:
    def leave(group: TensorDict) -> bool:
        raise GeneratorExit("left")

    collector = collect()
    collector.submit(items(1)[0], Answer(), should_accept=leave)
    for _ in range(2):
        with pytest.raises(RolloutError, match=r"event loop died: .*GeneratorExit\("):
            collector.wait(1, timeout=100)


def test_an_episode_that_takes_too_long_is_an_attempt_that_failed(collect: Collect) -> None:
    async def hang(item: dict[str, Any]) -> None:
        if item["number"] == 1:
            await asyncio.sleep(3600)

    collector = collect(request_timeout=0.2, request_retries=1)
    assert numbers(collector.rollout_batch(items(0, 1), Answer(hang))) == [0]
    assert collector.lost == {"CallTimeout: an episode of Answer did not end in 0.2 s": 1}
    assert collector.failed_attempts == {"CallTimeout": 2}


def test_a_time_out_names_what_is_late_and_cancels_it(collect: Collect) -> None:
    cancelled = threading.Event()

    async def hang(item: dict[str, Any]) -> None:
        if item["number"] == 1:
            try:
                await asyncio.sleep(3600)
            finally:
                cancelled.set()

    with pytest.raises(CallTimeout, match=r"1 groups had not ended after 0\.3 s: group 1 \(running for 0\.") as late:
        collect().rollout_batch(items(0, 1, 2), Answer(hang), timeout=0.3)
    assert late.value.late == ("group 1",)
    assert cancelled.wait(100)


def test_error_of_a_cancelled_workflow_is_not_retried(collect: Collect) -> None:
    attempts = []

    async def turn_into_another_error(data: dict[str, Any]) -> None:
        attempts.append(data)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            raise ValueError("the connection is gone") from error

    collector = collect(max_consecutive_failures=1)
    with pytest.raises(CallTimeout):
        collector.rollout_batch(items(1), Answer(turn_into_another_error), timeout=0.1)
    assert numbers(collector.rollout_batch(items(2), Answer())) == [2]
    assert (len(attempts), collector.failed_attempts.total(), dict(collector.lost)) == (1, 0, {"cancelled": 1})


# -- running ahead ---------------------------------------------------------------------------------------------------


def test_wait_hands_over_the_oldest_that_are_ready_in_their_order(collect: Collect) -> None:
    collector = collect(consumer_batch_size=4)
    ids = [collector.submit(item, Answer()) for item in items(0, 1, 2, 3)]
    batch = collector.wait(4)
    assert numbers(batch) == [0, 1, 2, 3]
    assert batch["group_ids"].tolist() == ids
    assert collector.counters.consumed == 4


def test_groups_start_only_while_they_would_not_get_too_old(collect: Collect, engine: ScriptedEngine) -> None:
    collector = collect(consumer_batch_size=2, max_head_offpolicyness=1, max_concurrent_rollouts=100)
    for item in items(*range(20)):
        collector.submit(item, Answer())
    assert numbers(collector.wait(4)) == [0, 1, 2, 3]
    assert engine.num_requests == 4, "(1 + 0 + 1) * 2 at version 0"
    with pytest.raises(RolloutError, match="no more may start: at policy version 0 with max_head_offpolicyness=1"):
        collector.wait(1)
    engine.set_version(1)
    batch = collector.wait(2)
    assert numbers(batch) == [4, 5]
    assert batch["versions"][:, 1].tolist() == [1, 1]
    assert engine.num_requests == 6
    assert collector.counters.waiting == 14


def test_a_dropped_group_gives_its_place_back(collect: Collect, engine: ScriptedEngine) -> None:
    collector = collect(consumer_batch_size=2)
    for item in items(0, 1, 2, 3):
        collector.submit(item, Answer(lambda item: DROP if item["number"] < 2 else None))
    assert numbers(collector.wait(2)) == [2, 3]
    assert collector.counters.rejected == 2


def test_waiting_for_more_than_was_submitted_is_an_error_and_not_a_hang(collect: Collect) -> None:
    collector = collect(consumer_batch_size=4, request_retries=0)
    for item in items(0, 1, 2):
        collector.submit(item, Answer(lambda item: item["oops"] if item["number"] == 1 else None))
    with pytest.raises(
        RolloutError, match=r"3 groups were asked for, \d are ready and \d under way; dropped so far: .*oops"
    ):
        collector.wait(3)
    assert numbers(collector.wait(2)) == [0, 2]


def test_the_most_common_reasons_are_told_and_not_all(collect: Collect) -> None:
    def fail(item: dict[str, Any]) -> None:
        raise ValueError(max(item["number"], 5))

    collector = collect(consumer_batch_size=20, request_retries=0, max_consecutive_failures=99)
    for item in items(*range(20)):
        collector.submit(item, Answer(fail))
    with pytest.raises(RolloutError, match=r"dropped so far: \{'ValueError: 5': 6, .*\}, and others; submit") as error:
        collector.wait(1)
    assert str(error.value).count("ValueError") == 5
    assert collector.lost.total() == 20


def test_a_collector_made_late_counts_what_was_consumed_before(collect: Collect, engine: ScriptedEngine) -> None:
    engine.set_version(5)
    collector = collect(consumer_batch_size=2, max_concurrent_rollouts=100)
    for item in items(*range(6)):
        collector.submit(item, Answer())
    collector.wait(2)
    assert engine.num_requests == 2


def test_prepare_batch_keeps_the_pipeline_full_and_reads_on_where_it_stopped(
    collect: Collect, engine: ScriptedEngine
) -> None:
    loader = [items(0, 1), items(2, 3), items(4, 5)]
    collector = collect(max_head_offpolicyness=1, max_concurrent_rollouts=8)
    seen = []
    for step in range(6):
        batch = collector.prepare_batch(loader, Answer(), group_size=2)
        assert len(batch) == 4
        oldest = batch["versions"].masked_fill(batch["versions"] < 0, 99).min().item()
        assert step - 1 <= oldest <= step
        seen += sorted(set(numbers(batch)))
        engine.set_version(step + 1)
    assert sorted(seen) == sorted([*range(6)] * 2), "every item once per epoch"


def test_prepare_batch_replaces_what_is_not_accepted(collect: Collect, engine: ScriptedEngine) -> None:
    groups = []

    def is_even(group: TensorDict) -> bool:
        groups.append(len(group))
        return numbers(group)[0] % 2 == 0

    collector = collect()
    batch = collector.prepare_batch([items(0, 1, 2, 3), items(4, 5, 6, 7)], Answer(), is_even, group_size=2)
    assert {number % 2 for number in numbers(batch)} == {0}
    assert len(batch) == 8
    assert set(groups) == {2}


def test_a_filter_that_accepts_nothing_stops_the_run(collect: Collect) -> None:
    collector = collect(max_consecutive_rejections=10)
    with pytest.raises(RolloutError, match="10 groups in a row were dropped: not accepted by should_accept"):
        collector.prepare_batch([items(0, 1)], Answer(), lambda group: False)
    with pytest.raises(RolloutError, match="should_accept raised KeyError"):
        collector.prepare_batch([items(0, 1)], Answer(), lambda group: group["difficulty"])


def test_time_out_covers_a_whole_call_with_replacements(collect: Collect) -> None:
    async def answer_slowly(item: dict[str, Any]) -> None:
        await asyncio.sleep(0.05)

    started = time.monotonic()
    with pytest.raises(CallTimeout, match=r"had not ended after 0\.5 s"):
        collect().prepare_batch([items(0, 1)], Answer(answer_slowly), lambda group: False, timeout=0.5)
    assert time.monotonic() - started < 100


def test_failed_attempts_of_an_evaluation_are_not_counted_among_those_of_training(collect: Collect) -> None:
    def fail(item: dict[str, Any]) -> None:
        raise ValueError("no answer")

    collector = collect(request_retries=0)
    assert [one.status for one in collector.evaluate(items(0, 1), Answer(fail))] == ["failed", "failed"]
    assert not collector.failed_attempts
    assert not collector.lost


def test_groups_that_end_at_any_moment_are_replaced(collect: Collect, engine: ScriptedEngine) -> None:
    collector, interval = collect(), sys.getswitchinterval()
    workflow = Answer(lambda data: DROP if data["number"] % 3 == 0 else None)
    loader = [items(0, 1), items(2, 3)]
    sys.setswitchinterval(1e-6)  # the threads take turns as often as they can
    try:
        for step in range(25):
            assert len(collector.prepare_batch(loader, workflow)) == 2
            engine.set_version(step + 1)
    finally:
        sys.setswitchinterval(interval)


def test_a_version_that_does_not_move_is_an_error_and_not_a_hang(collect: Collect) -> None:
    collector = collect()
    loader = [items(0, 1), items(2, 3)]
    collector.prepare_batch(loader, Answer())
    with pytest.raises(RolloutError, match="Sync weights after each batch"):
        collector.prepare_batch(loader, Answer())


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "has nothing"),
        (iter([items(0)]), "has nothing"),
        ([3], "object of type 'int'"),
        ([items(0, 1), []], "empty"),
    ],
)
def test_a_loader_that_yields_no_items_is_refused(
    collect: Collect, engine: ScriptedEngine, loader: Any, message: str
) -> None:
    collector = collect()

    def train() -> None:
        for step in range(3):
            collector.prepare_batch(loader, Answer())
            engine.set_version(step + 1)

    with pytest.raises((DataError, TypeError), match=message):
        train()


def test_nothing_starts_during_a_pause(collect: Collect, engine: ScriptedEngine) -> None:
    collector = collect(consumer_batch_size=2)
    collector.pause()
    for item in items(1, 2):
        collector.submit(item, Answer())
    with pytest.raises(CallTimeout, match=r"2 groups had not ended after 0\.1 s: group 0 \(waiting\), group 1"):
        collector.wait(2, timeout=0.1)
    assert engine.num_requests == 0
    collector.resume()
    assert numbers(collector.wait(2)) == [1, 2]


def hold_back(*late: int) -> tuple[Answer, threading.Event]:
    """A workflow in which these numbers are not answered until the event is set."""
    released = threading.Event()

    async def linger(item: dict[str, Any]) -> None:
        while item["number"] in late and not released.is_set():
            await asyncio.sleep(0.01)

    return Answer(linger), released


def until_ready(collector: RolloutCollector, count: int) -> None:
    deadline = time.monotonic() + 100
    while collector.counters.ready < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert collector.counters.ready == count


def test_a_batch_waits_for_a_group_that_would_be_too_old_for_the_next(collect: Collect, engine: ScriptedEngine) -> None:
    collector = collect(consumer_batch_size=2, max_head_offpolicyness=1, max_concurrent_rollouts=8)
    workflow, released = hold_back(0)
    for item in items(*range(8)):
        collector.submit(item, workflow)
    until_ready(collector, 3)
    assert numbers(collector.wait(2)) == [1, 2]
    engine.set_version(1)
    with pytest.raises(CallTimeout, match=r"group 0 \(running"):
        collector.wait(2, timeout=0.5)
    assert collector.counters.ready >= 2
    released.set()
    assert numbers(collector.wait(2)) == [0, 3]
    engine.set_version(2)
    assert numbers(collector.wait(2)) == [4, 5]
    assert not collector.lost


def test_a_group_holds_a_batch_no_longer_than_its_time_out(collect: Collect, engine: ScriptedEngine) -> None:
    collector = collect(consumer_batch_size=1, max_concurrent_rollouts=8, max_head_offpolicyness=1, stale_timeout=0.5)
    workflow, _ = hold_back(0)
    for item in items(*range(3)):
        collector.submit(item, workflow)
    assert numbers(collector.wait(1)) == [1]
    engine.set_version(1)
    assert numbers(collector.wait(1)) == [2]
    assert collector.lost == {"too old: it held up a batch for 0.5 s": 1}


def test_on_stale_drop_replaces_groups_that_are_too_old(collect: Collect, engine: ScriptedEngine) -> None:
    collector = collect(consumer_batch_size=2, max_head_offpolicyness=1, max_concurrent_rollouts=8, on_stale="drop")
    workflow, _ = hold_back(0)
    for item in items(*range(9)):
        collector.submit(item, workflow)
    stats_tracker.export()
    for version, expected in enumerate([[1, 2], [3, 4], [5, 6]]):
        engine.set_version(version)
        collector.version_changed()
        until_ready(collector, (3, 3, 4)[version])
        assert numbers(collector.wait(2)) == expected
    assert collector.lost == {"too old": 1}
    assert stats_tracker.export()["rollout/staleness"] <= 1


def test_dropping_what_is_too_old_reports_the_lengths(collect: Collect, engine: ScriptedEngine) -> None:
    """The last answer has 50 tokens and would take long: at the moment when it is dropped some of them are there."""
    engine._latency = lambda request: 2.0 if request.input_ids[0] == 50 else 0.0
    collector = collect(consumer_batch_size=2, max_concurrent_rollouts=8, max_head_offpolicyness=1, on_stale="drop")
    for item in items(49, 1, 2, 3, 4, 5, 6):
        collector.submit(item, Answer())
    stats_tracker.export()
    for version in range(3):
        time.sleep(0.3)
        engine.set_version(version)
        collector.wait(2)
    stats = stats_tracker.export()
    assert stats["rollout/num_dropped_too_old"] == 1
    assert 5 <= stats["rollout/length_dropped"] <= 45
    assert stats["rollout/length_kept"] < 8


def test_no_token_is_consumed_that_is_older_than_the_bound(collect: Collect, engine: ScriptedEngine) -> None:
    """The version moves without a batch: what is ready and too old is not handed over."""
    collector = collect(consumer_batch_size=2, max_head_offpolicyness=1, max_concurrent_rollouts=8)
    for item in items(*range(6)):
        collector.submit(item, Answer())
    until_ready(collector, 4)
    engine.set_version(2)
    batch = collector.wait(2)
    assert numbers(batch) == [4, 5]
    assert batch["versions"].max() == 2
    assert collector.lost == {"too old": 4}


def test_rollouts_ahead_survive_a_restart(collect: Collect, engine: ScriptedEngine) -> None:
    """Finished groups are kept, those under way run again: nothing is lost, nothing is consumed twice."""
    options = {"consumer_batch_size": 2, "max_head_offpolicyness": 2, "max_concurrent_rollouts": 8, "seed": 1}
    collector = collect(**options)
    workflow, _ = hold_back(3, 4)
    for item in items(*range(9)):
        collector.submit({**item, "array": np.arange(2), "by_place": {0: np.float64(0.5)}}, workflow)
    first = numbers(collector.wait(2))
    while collector.counters.ready < 2:
        time.sleep(0.01)
    buffer = io.BytesIO()
    torch.save(collector.state_dict(), buffer)
    before = collector.counters
    collector.close()

    buffer.seek(0)
    resumed = collect(**options)
    resumed.load_state_dict(torch.load(buffer, weights_only=True), Answer())
    after = resumed.counters
    assert (after.submitted, after.consumed) == (before.submitted, before.consumed) == (9, 2)
    consumed = list(first)
    for version, count in ((1, 2), (2, 2), (3, 2), (4, 1)):
        engine.set_version(version)
        consumed += numbers(resumed.wait(count))
    assert sorted(consumed) == list(range(9))
    assert resumed.submit(items(9)[0], Answer()) == 9


def test_groups_that_do_not_say_their_versions_keep_their_age_over_a_restart(
    collect: Collect, engine: ScriptedEngine
) -> None:
    options = {"consumer_batch_size": 1, "max_head_offpolicyness": 1}
    workflow = Answer(lambda item: without_versions(item["number"]))
    collector = collect(**options)
    collector.submit(items(5)[0], workflow)
    while not collector.counters.ready:
        time.sleep(0.01)
    engine.set_version(1)
    resumed = collect(**options)
    resumed.load_state_dict(collector.state_dict(), workflow)
    engine.set_version(2)
    with pytest.raises(RolloutError, match="too old"):
        resumed.wait(1)


def test_a_restart_with_another_batch_size_is_refused(collect: Collect) -> None:
    collector = collect(consumer_batch_size=2)
    with pytest.raises(CheckpointError, match="has consumer_batch_size=4: resume with consumer_batch_size=2"):
        collect(consumer_batch_size=4).load_state_dict(collector.state_dict(), Answer())
    collector.submit({"number": 1, "odd": object()}, Answer())
    with pytest.raises(DataError, match="group 0, key 'odd' holds object"):
        collector.state_dict()


def test_failures_that_end_first_do_not_stop_a_batch_in_which_others_run(collect: Collect) -> None:
    """One row in four fails at once, and all answers take a while: the first to end are failures alone."""

    def fail(item: dict[str, Any]) -> None:
        if item["number"] % 4 == 0:
            raise ValueError("no such row")

    collector = collect(request_retries=0, max_consecutive_failures=4)
    batch = collector.rollout_batch(items(*range(40)), Answer(fail))
    assert numbers(batch) == [number for number in range(40) if number % 4]
    assert collector.lost == {"ValueError: no such row": 10}


# -- the rest --------------------------------------------------------------------------------------------------------


def test_a_batch_reports_staleness_and_losses(collect: Collect, engine: ScriptedEngine) -> None:
    collector = collect(consumer_batch_size=2, max_head_offpolicyness=3, max_concurrent_rollouts=8)
    for item in items(0, 1, 2, 3):
        collector.submit(item, Answer(lambda item: DROP if item["number"] == 0 else None))
    until_ready(collector, 3)
    engine.set_version(2)
    stats_tracker.export()
    collector.wait(2)
    stats = stats_tracker.export()
    assert stats["rollout/staleness"] == 2.0
    assert stats["rollout/num_lost"] == 1.0
    assert stats["rollout/num_groups"] == 2.0
    assert stats["rollout/lost/the_workflow_returned_None"] == 1.0


def test_counts_of_groups_are_added_over_the_batches_of_a_step(collect: Collect) -> None:
    def fail(item: dict[str, Any]) -> None:
        if item["number"] % 2:
            raise ValueError("odd")

    collector = collect(request_retries=0)
    stats_tracker.export()
    for _ in range(3):
        collector.rollout_batch(items(1, 2, 4), Answer(fail))
    collector.evaluate(items(1, 3), Answer(fail))
    stats = stats_tracker.export()
    assert (stats["rollout/num_groups"], stats["rollout/num_lost"], stats["rollout/num_failed_attempts"]) == (6, 3, 3)
    assert stats["rollout/lost/ValueError"] == 3


def test_groups_that_are_not_accepted_are_not_lost(collect: Collect) -> None:
    collector = collect(consumer_batch_size=2)
    stats_tracker.export()
    accepted = iter([False, True, False, True])
    collector.prepare_batch([items(1, 2, 3, 4)], Answer(), should_accept=lambda group: next(accepted, True))
    stats = stats_tracker.export()
    assert stats["rollout/num_lost"] == 0
    assert stats["rollout/num_refused"] >= 1


def test_wrong_arguments_are_refused_before_anything_runs(collect: Collect, engine: ScriptedEngine) -> None:
    collector = collect()
    for call, kind in (
        (lambda: collector.rollout_batch([], Answer()), DataError),
        (lambda: collector.rollout_batch(["text"], Answer()), DataError),  # type: ignore[list-item]
        (lambda: collector.rollout_batch(items(1), Answer), ConfigError),  # type: ignore[arg-type]
        (lambda: collector.rollout_batch(items(1), Answer(), group_size=0), ConfigError),
        (lambda: collector.wait(0), ConfigError),
        (lambda: CollectorOptions(request_retries=-1), ConfigError),
        (lambda: CollectorOptions(request_timeout=0), ConfigError),
    ):
        with pytest.raises(kind):
            call()
    assert engine.num_requests == 0


def test_a_closed_collector_says_so(collect: Collect) -> None:
    collector = collect()
    collector.close()
    collector.close()
    with pytest.raises(RolloutError, match="the collector is closed"):
        collector.rollout_batch(items(1), Answer())
