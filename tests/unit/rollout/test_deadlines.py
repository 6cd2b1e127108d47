"""User code that does not let itself be cancelled, or that wants to end the program, costs its own episode alone."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
from tensordict import TensorDict

from rlite.errors import CallTimeout
from rlite.evaluation.episodes import evaluate, run_episodes
from rlite.evaluation.sets import EvaluationSet
from rlite.rollout import (
    CollectorOptions,
    LLMRequest,
    RewardFunction,
    RolloutCollector,
    RolloutWorkflow,
    ScriptedEngine,
    trajectory,
)
from rlite.rollout.collector.ended import Ended
from rlite.rollout.failures import RewardRaised, RewardTimeout
from rlite.rollout.tools.formats import ToolCall
from rlite.rollout.tools.toolbox import Toolbox
from rlite.runtime.event_loop import ABANDONED, Abandoned, LoopThread, Overdue, UserExit, by_deadline

CALL: dict[str, Any] = {"prompt": "", "completions": "", "prompt_ids": [], "completion_ids": []}
ITEMS = [{"number": number} for number in range(3)]
OPTIONS = CollectorOptions(request_timeout=0.3, request_retries=3, consumer_batch_size=2, max_head_offpolicyness=1)


class Stubborn:
    """Swallows every exception until the test is over."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def end(self) -> None:
        """Let all calls end."""
        self.is_over.set()
        deadline = time.monotonic() + 10
        while ABANDONED and time.monotonic() < deadline:
            time.sleep(0.01)

    async def __call__(self, *of_tool: Any, **call: Any) -> str:
        """Sleep for an hour."""
        while not self.is_over.is_set():
            with contextlib.suppress(BaseException):  # a bare `except:`
                await asyncio.sleep(0.01)
        return "late"


@pytest.fixture
def stubborn() -> Iterator[Stubborn]:
    code = Stubborn()
    yield code
    code.end()


class Acts(RolloutWorkflow):
    """Answers; the second item does something else before."""

    def __init__(self, act: Callable[[Any], Any]) -> None:
        self.act = act

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        if data["number"] == 1:
            await self.act(engine)
        return trajectory(await engine.agenerate(LLMRequest(input_ids=[1])), reward=1.0)


def by_rollout_batch(collector: RolloutCollector, workflow: RolloutWorkflow) -> list[str]:
    batch = collector.rollout_batch(ITEMS, workflow)
    return [*collector.lost, f"{len(batch)} left"]


def by_rollouts_ahead(collector: RolloutCollector, workflow: RolloutWorkflow) -> list[str]:
    for item in ITEMS:
        collector.submit(item, workflow)
    batch = collector.wait(2, timeout=60)
    while not collector.lost:
        time.sleep(0.01)
    return [*collector.lost, f"{len(batch)} left"]


def by_evaluation(collector: RolloutCollector, workflow: RolloutWorkflow) -> list[str]:
    found = evaluate(collector, EvaluationSet("", ITEMS, workflow))
    return [*found.lost, f"{sum(sample.score is not None for sample in found.samples)} left"]


def by_rlite_eval(collector: RolloutCollector, workflow: RolloutWorkflow) -> list[str]:
    ended: list[Ended] = []
    run_episodes(
        collector.engine, EvaluationSet("", ITEMS, workflow), [(item, 0) for item in range(3)], OPTIONS, ended.append
    )
    reasons = [each.reason for each in ended if each.reason]
    return [*reasons, f"{sum(each.status == 'evaluated' for each in ended)} left"]


MODES = [by_rollout_batch, by_rollouts_ahead, by_evaluation, by_rlite_eval]


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_that_ignores_its_deadline_is_abandoned_in_every_mode(
    mode: Callable[..., list[str]], stubborn: Stubborn, caplog: pytest.LogCaptureFixture
) -> None:
    collector = RolloutCollector(ScriptedEngine([[7]]), OPTIONS)
    began = time.monotonic()
    reason, left = mode(collector, Acts(stubborn))
    assert time.monotonic() - began < 60, "the test would wait for ever"
    assert left == "2 left"
    assert reason.startswith("CallTimeout: an episode of Acts did not end in 0.3 s: it ignores its cancellation")
    assert "in __call__" in reason, "the place is named"
    assert len(ABANDONED) <= 1, "code that goes on is not begun again"
    assert "abandoned task" in caplog.text
    stubborn.end()
    collector.close()


def test_requests_of_an_abandoned_episode_are_refused(stubborn: Stubborn) -> None:
    failures: list[Exception] = []

    async def ask_late(engine: Any) -> None:
        await stubborn()
        try:
            await engine.agenerate(LLMRequest(input_ids=[9]))
        except Exception as error:
            failures.append(error)

    engine = ScriptedEngine([[7]])
    collector = RolloutCollector(engine, OPTIONS)
    by_rollout_batch(collector, Acts(ask_late))
    stubborn.is_over.set()
    while not failures:
        time.sleep(0.01)
    assert "the attempt at this episode has ended" in str(failures[0])
    assert engine.num_requests == 2
    collector.close()


def test_a_sibling_that_ignores_its_cancellation_does_not_delay_the_end_of_its_group(stubborn: Stubborn) -> None:
    class FailsOnce(RolloutWorkflow):
        count = 0

        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict | None:
            self.count += 1
            if self.count == 1:
                await stubborn()
            raise ValueError("this group is lost")

    collector = RolloutCollector(ScriptedEngine([[7]]), CollectorOptions(request_retries=0))
    found = collector.collect([{}], FailsOnce(), group_size=2, timeout=60)
    assert found.lost == {"ValueError: this group is lost": 1}
    stubborn.end()
    collector.close()


class OwnExit(BaseException):
    pass


EXITS = [SystemExit(1), KeyboardInterrupt(), GeneratorExit("left"), OwnExit("own")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("death", EXITS, ids=repr)
@pytest.mark.parametrize("has_task", [False, True])
def test_an_exception_that_ends_programs_costs_its_episode(
    mode: Callable[..., list[str]], death: BaseException, has_task: bool
) -> None:
    async def leave(engine: Any) -> None:
        raise death

    async def leave_in_a_task(engine: Any) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(leave(engine))

    collector = RolloutCollector(ScriptedEngine([[7]]), OPTIONS)
    reason, left = mode(collector, Acts(leave_in_a_task if has_task else leave))
    assert left == "2 left"
    assert reason.startswith("UserExit: an episode of Acts raised ")
    assert type(death).__name__ in reason
    assert collector.rollout_batch(ITEMS[:1], Acts(leave)).batch_size[0] == 1, "the collector goes on"
    collector.close()


def test_an_async_tool_that_ignores_its_deadline_is_a_result_at_its_deadline(stubborn: Stubborn) -> None:
    async def rest(hours: int) -> str:
        """Sleep.

        Args:
            hours: how long
        """
        return await stubborn()

    async def leave() -> str:
        """Leave."""
        raise SystemExit("bye")

    async def both() -> list[str]:
        tools = Toolbox([rest, leave], timeout=0.1)
        calls = [ToolCall("rest", {"hours": 1}), ToolCall("leave", {})]
        return [(await tools.call(call)).text for call in calls]

    results: list[str] = []
    loop = LoopThread("tools")
    results = loop.result(loop.submit(both()))
    assert results == ["Error: rest took too long", "Error: SystemExit: bye"]
    stubborn.end()
    loop.stop()
    loop.join()


def test_a_judge_that_ignores_its_deadline_is_a_time_out_at_its_deadline(stubborn: Stubborn) -> None:
    reward = RewardFunction(stubborn, in_process=True, timeout=0.1)  # type: ignore[arg-type]
    with pytest.raises(RewardTimeout, match=r"did not end in 0\.1 s: it ignores its cancellation"):
        asyncio.run(reward(**CALL))


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("death", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), OwnExit()], ids=repr)
def test_a_reward_in_this_process_that_wants_to_end_it_fails(death: BaseException, batch_size: int | None) -> None:
    def leave(**call: Any) -> float:
        raise death

    async def leave_later(**call: Any) -> float:
        raise death

    class Graded(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
            await rewards[data["number"]](**CALL)
            raise AssertionError("there is no reward")

    rewards = [RewardFunction(fn, in_process=True, batch_size=batch_size, timeout=5) for fn in (leave, leave_later)]
    collector = RolloutCollector(ScriptedEngine([[7]]), CollectorOptions(request_retries=0, request_timeout=30))
    ended = collector.evaluate(ITEMS[:2], Graded(), timeout=60)
    assert [each.reason.partition(":")[0] in ("RewardRaised", "UserExit") for each in ended] == [True, True]
    assert RewardRaised.__name__ in ended[1].reason
    collector.close()


@pytest.mark.parametrize("death", [KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), OwnExit()], ids=repr)
def test_a_reward_that_ends_its_batch_costs_the_other_completions_nothing(death: BaseException) -> None:
    def grade(completions: Sequence[str], **call: Any) -> list[float]:
        if "bad" in completions:
            raise death
        return [1.0] * len(completions)

    async def ask_all() -> list[Any]:
        reward = RewardFunction(grade, in_process=True, batch_size=3)
        calls = [reward(**{**CALL, "completions": text}) for text in ("good", "bad", "good")]
        waiting = [asyncio.create_task(_returned(call)) for call in calls]
        return [await each for each in waiting]

    async def _returned(call: Awaitable[float]) -> Any:
        try:
            return await call
        except BaseException as error:
            return type(error)

    assert asyncio.run(ask_all()) == [1.0, type(death), 1.0]


def test_code_that_blocks_the_loop_is_named_and_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlite.runtime.event_loop.LOOK_INTERVAL", 0.2)
    release = threading.Event()

    async def sleep_synchronously(engine: Any) -> None:
        release.wait(60)

    collector = RolloutCollector(ScriptedEngine([[7]]), OPTIONS)
    for mode in (by_rollout_batch, by_rlite_eval):
        threading.Timer(6, release.set).start()  # the thread of `rlite eval` is joined
        with pytest.raises(CallTimeout, match="has blocked the rollouts' event loop") as blocked:
            mode(collector, Acts(sleep_synchronously))
        assert "in sleep_synchronously" in str(blocked.value)
        release.clear()
    release.set()
    collector.close()


def test_code_that_ends_while_it_is_cancelled_is_late_and_not_abandoned() -> None:
    async def clean_up() -> str:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
        return "late"

    async def swallow() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "late"
        return ""

    async def leave() -> None:
        raise SystemExit(3)

    for late in (clean_up, swallow):
        with pytest.raises(Overdue) as overdue:
            asyncio.run(by_deadline(late(), 0.01, "the code"))
        assert not isinstance(overdue.value, Abandoned)
    assert asyncio.run(by_deadline(asyncio.sleep(0, "early"), None, "the code")) == "early"
    loop = LoopThread("exits")
    with pytest.raises(UserExit, match=r"the code raised SystemExit\(3\)"):
        loop.result(loop.submit(by_deadline(leave(), 1, "the code")))
    loop.stop()
    loop.join()


FOREVER = """
import asyncio
from rlite.rollout import CollectorOptions, RolloutCollector, RolloutWorkflow, ScriptedEngine

class Forever(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        while True:
            try:
                await asyncio.sleep(0.01)
            except:
                pass

collector = RolloutCollector(ScriptedEngine([[7]]), CollectorOptions(request_timeout=0.1))
print(collector.collect([{}], Forever()).lost.total())
collector.close()
"""


def test_a_program_ends_although_code_goes_on_for_ever() -> None:
    ended = subprocess.run([sys.executable, "-c", FOREVER], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout) == (0, "1\n")
    assert "destroyed" not in ended.stderr
