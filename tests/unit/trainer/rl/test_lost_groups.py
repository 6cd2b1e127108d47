"""Groups that are lost cost themselves alone, whether rollouts run ahead or not; and the console tells of them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tensordict import TensorDict

from rlite.assembly.rl import PartsMaker
from rlite.data.rows import prompt_stream
from rlite.observability import stats_tracker
from rlite.rollout import (
    LLMRequest,
    RolloutCollector,
    RolloutError,
    RolloutWorkflow,
    ScriptedEngine,
    trajectory,
)
from rlite.services.console.alarms import Alarms
from rlite.services.console.terminal import ConsoleReporter
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions

NUM_ROWS = 200


class Flaky(RolloutWorkflow):
    """One row in twenty raises; of the others half of the groups are uniform, so that single groups are asked for."""

    def __init__(self, fails: Callable[[int], bool], error: BaseException) -> None:
        self.fails, self.error, self.count = fails, error, 0

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        if self.fails(data["number"]):
            raise self.error
        response = await engine.agenerate(LLMRequest(input_ids=[1]))
        self.count += 1
        return trajectory(response, reward=float(self.count % 2) if data["number"] % 2 else 1.0)


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """Makes what a trainer gets its batches from, around a scripted engine."""
    collectors = []

    def of(
        ahead: int,
        workflow: RolloutWorkflow,
        prompts: int = 4,
        answer: Any = ((7,),),
        max_consecutive_rejections: int = 1024,
        **options: Any,
    ) -> Any:
        engine = ScriptedEngine(answer)
        config = PpoConfig(
            actor=ActorOptions(model_name="x"),
            train_data=PromptOptions(prompts_per_rollout=prompts, responses_per_prompt=4),
            rollout=RolloutOptions(max_head_offpolicyness=ahead, max_refills=8, **options),
        )
        limits = {"request_retries": 0, "max_consecutive_rejections": max_consecutive_rejections, "keep_ended": False}
        collector = RolloutCollector(engine, config.collector_options().model_copy(update=limits))
        collectors.append(collector)
        served = SimpleNamespace(collector=collector, prepare_batch=collector.prepare_batch)
        stream = prompt_stream([{"number": number} for number in range(NUM_ROWS)], prompts, seed=0)
        engines: Any = SimpleNamespace(rollout=served)
        rollouts = PartsMaker(config).rollouts(engines, workflow, stream)
        return SimpleNamespace(engine=engine, rollouts=rollouts, collector=collector)

    stats_tracker.export()
    yield of
    for collector in collectors:
        collector.close()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("has_filter", [True, False])
def test_one_failing_row_in_twenty_stops_no_run(make: Callable[..., Any], ahead: int, has_filter: bool) -> None:
    workflow = Flaky(lambda number: number % 20 == 0, ValueError("no answer"))
    run = make(ahead, workflow, dynamic_filtering=has_filter)
    lost = 0.0
    for step in range(30):
        batch = run.rollouts.next_batch()
        run.engine.set_version(step + 1)
        metrics = stats_tracker.export()
        lost += metrics["rollout/num_lost"]
        num_groups = len(batch["group_ids"].unique())
        assert num_groups == 4 if has_filter or ahead else 1 <= num_groups <= 4
    assert lost >= 3


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError("no answer"), "ValueError: no answer"), (asyncio.CancelledError(), "cancelled")]
)
def test_a_run_in_which_everything_fails_stops_with_the_reason(
    make: Callable[..., Any], ahead: int, error: BaseException, reason: str
) -> None:
    run = make(ahead, Flaky(lambda number: True, error))
    with pytest.raises(RolloutError, match=rf"groups in a row failed, the last with {reason}"):
        run.rollouts.next_batch()


def tell(run: Any, metrics: dict[str, float], step: int = 1, *settings: str) -> str:
    """What the console says of a step."""
    out = io.StringIO()
    told_by: Any = SimpleNamespace(step=step, console=ConsoleReporter(file=out))
    engine: Any = SimpleNamespace()
    alarms = Alarms(engine, is_ahead=False, can_equal_rewards_teach=False)
    alarms.look(told_by, metrics, run.collector.first_losses, run.collector.take_selection())
    return out.getvalue()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("rejections", [6, 1024])
def test_equal_rewards_are_filtered_up_to_max_refills_and_then_trained_on_with_an_alarm(
    make: Callable[..., Any], ahead: int, rejections: int
) -> None:
    class Uniform(Flaky):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
            return trajectory(await engine.agenerate(LLMRequest(input_ids=[1])), reward=1.0)

    run = make(ahead, Uniform(lambda number: False, ValueError()), max_consecutive_rejections=rejections)
    for step in range(2):
        assert len(run.rollouts.next_batch()) == 16
        run.engine.set_version(step + 1)
        metrics = stats_tracker.export()
        assert metrics["num_unreplaced"] == 4
        assert metrics["num_filtered"] >= 8 * 4 * (step == 0)
        assert "rollout.max_refills is spent" in tell(run, metrics)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_workflow_that_refuses_every_group_stops_the_run_in_both_modes(make: Callable[..., Any], ahead: int) -> None:
    class Refuses(Flaky):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            return None

    run = make(ahead, Refuses(lambda number: False, ValueError()), max_consecutive_rejections=8)
    with pytest.raises(RolloutError, match="8 groups in a row were dropped: the workflow returned None"):
        run.rollouts.next_batch()


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_judge_that_fails_on_long_answers_is_told_with_the_lengths(make: Callable[..., Any], ahead: int) -> None:
    class Judged(Flaky):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
            self.count += 1
            response = await engine.agenerate(LLMRequest(input_ids=[1] * (141 if self.count % 16 == 1 else 32)))
            if response.output_len == 141:
                raise TimeoutError("the judge takes too long")
            return trajectory(response, reward=float(self.count % 2))

    run = make(ahead, Judged(lambda number: False, ValueError()), answer=lambda request: [7] * len(request.input_ids))
    told = ""
    for step in range(6):
        run.rollouts.next_batch()
        run.engine.set_version(step + 1)
        metrics = stats_tracker.export()
        if "rollout/length_failed" in metrics:
            assert (metrics["rollout/length_failed"], metrics["rollout/length_kept"]) == (141, 32)
    told = tell(run, metrics)
    assert "answers that fail are longer than others" in told
    assert "mean length 141 tokens" in told


def test_a_batch_of_which_nothing_is_left_is_asked_for_again(make: Callable[..., Any]) -> None:
    seen: dict[int, int] = {}
    workflow = Flaky(lambda number: seen.setdefault(number, len(seen)) < 3, ValueError("down"))
    run = make(0, workflow, prompts=1, dynamic_filtering=False)
    assert len(run.rollouts.next_batch()) == 4
    assert run.collector.lost == {"ValueError: down": 3}


def test_the_console_tells_the_first_loss_for_each_reason(make: Callable[..., Any]) -> None:
    kinds: dict[int, BaseException] = {3: ValueError("row 3"), 5: ValueError("row 5"), 7: KeyError("answer")}

    class Failing(Flaky):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
            if (error := kinds.get(data["step"])) is not None:
                raise error
            return await super().arun_episode(engine, {"number": 1})

    collector = make(0, Flaky(lambda number: False, ValueError())).collector
    out = io.StringIO()
    told_by: Any = SimpleNamespace(step=0, console=ConsoleReporter(file=out))
    engine: Any = SimpleNamespace()
    alarms = Alarms(engine, is_ahead=False, can_equal_rewards_teach=False)
    for step in range(10):
        collector.rollout_batch([{"step": step}, {"step": -1}], Failing(lambda number: False, ValueError()))
        told_by.step = step
        alarms.look(told_by, stats_tracker.export(), collector.first_losses)
    told = out.getvalue()
    assert told.count("were lost") == 2
    assert "step 3: 1 of 2 groups were lost" in told
    assert "1 x  ValueError: row 3" in told
    assert "step 7: 1 of 2 groups were lost" in told
    assert "1 x  KeyError: 'answer'" in told
