"""A failed attempt does not choose among answers: the next one gets the same, or the group counts as redrawn."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tensordict import TensorDict

from rlite.observability import stats_tracker
from rlite.rollout import (
    CollectorOptions,
    GenerationHyperparameters,
    LLMRequest,
    RolloutCollector,
    RolloutWorkflow,
    ScriptedEngine,
    trajectory,
)
from rlite.rollout.collector.lost_groups import Selection
from rlite.rollout.draws import chunks_of
from rlite.types import LLMResponse, TokenChunk

GCONFIG = GenerationHyperparameters(max_new_tokens=200)
Collect = Callable[..., RolloutCollector]


class Sampler(ScriptedEngine):
    """Draws short or long answers of random tokens; `seed` makes it draw by the seed of a request."""

    def __init__(self, has_seed: bool = False, latency: float = 0.0) -> None:
        self._random = random.Random(0)
        self.asked: list[tuple[tuple[int, ...], int | None]] = []
        super().__init__(self._draw, latency=lambda request: latency if self.is_slow(request) else 0.0)
        if has_seed:
            self.seed = 5
        self.slow_requests = 0

    def is_slow(self, request: LLMRequest) -> bool:
        self.slow_requests -= 1
        return self.slow_requests >= 0

    def _draw(self, request: LLMRequest) -> list[int]:
        seed = request.gconfig.seed
        self.asked.append((tuple(request.input_ids), seed))
        own = self._random if seed is None else random.Random(seed)
        return [own.randrange(1000) for _ in range(own.choice([4, 100]))]


def joined(chunks: list[TokenChunk], read: list[int]) -> LLMResponse:
    """The response that chunks make; the lists of the only chunk are its own, as an agent would take them."""
    first, *others = chunks
    versions = [first.version] * len(first.token_ids)
    for chunk in others:
        first.token_ids.extend(chunk.token_ids)
        first.logprobs.extend(chunk.logprobs)
        versions += [chunk.version] * len(chunk.token_ids)
    return LLMResponse(
        input_tokens=[*read],
        output_tokens=first.token_ids,
        output_logprobs=first.logprobs,
        output_versions=versions,
        stop_reason=chunks[-1].finish_reason or "abort",
        latency=0,
        ttft=0,
    )


class Ask(RolloutWorkflow):
    """Asks for some turns, each of which reads the turn before, and fails as `grade` says."""

    def __init__(self, grade: Callable[..., float], turns: int = 1, streams: bool = False) -> None:
        self.grade, self.turns, self.streams = grade, turns, streams

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        read = [1, 2]
        for turn in range(self.turns):
            request = LLMRequest(input_ids=read, gconfig=GCONFIG)
            if self.streams:
                response = joined([chunk async for chunk in engine.stream(request)], read)
            else:
                response = await engine.agenerate(request)
            written = [*response.output_tokens]
            response.output_tokens.append(3)  # what a workflow does to its own answer is no part of the draw
            response.output_logprobs.append(0.0)
            response.output_versions.append(0)
            reward = self.grade(data, turn, written)
            read = [*read, *written]
        made = trajectory(response, reward=reward)
        return made


@pytest.fixture
def collect() -> Iterator[Collect]:
    made: list[RolloutCollector] = []

    def of(engine: ScriptedEngine, **options: Any) -> RolloutCollector:
        made.append(RolloutCollector(engine, CollectorOptions(**options)))
        return made[-1]

    stats_tracker.export()
    yield of
    for collector in made:
        collector.close()


class Flaky:
    """Fails at the first call for each answer, or at every call for answers of some kind; keeps what it has seen."""

    def __init__(self, turn: int = 0) -> None:
        self.turn, self.seen = turn, dict[int, list[list[int]]]()

    def __call__(self, data: dict[str, Any], turn: int, written: list[int]) -> float:
        seen = self.seen.setdefault(data["number"], [])
        seen.append(written)
        if turn == self.turn and len(seen) == self.turn + 1:
            raise ConnectionError("the judge is busy")
        return 1.0


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("turns", [1, 3])
def test_another_attempt_has_the_same_answers_and_the_engine_draws_each_once(
    collect: Collect, streams: bool, turns: int
) -> None:
    engine, judge = Sampler(), Flaky(turn=turns - 1)
    collector = collect(engine)
    collector.rollout_batch([{"number": number} for number in range(4)], Ask(judge, turns, streams))
    for seen in judge.seen.values():
        assert seen[:turns] == seen[turns:]
    assert len(engine.asked) == 4 * turns
    assert collector.failed_attempts == {"ConnectionError": 4}
    stats = stats_tracker.export()
    assert (stats["rollout/num_redrawn"], stats["rollout/failed_attempts/ConnectionError"]) == (0, 4)


def test_a_judge_that_fails_on_long_answers_loses_them_and_the_lengths_are_reported(collect: Collect) -> None:
    def judge(data: dict[str, Any], turn: int, written: list[int]) -> float:
        if len(written) > 50:
            raise TimeoutError("the judge takes too long")
        return 0.0

    collector = collect(Sampler(), max_consecutive_failures=1000)
    batch = collector.rollout_batch([{"number": number} for number in range(200)], Ask(judge))
    assert 70 <= len(batch) <= 130, "half of the answers are long, and four attempts change nothing"
    stats = stats_tracker.export()
    assert (stats["rollout/length_failed"], stats["rollout/length_kept"]) == (100, 5)  # with the workflow's own token
    causes = dict(collector.take_selection().alarms())
    assert [cause for cause in causes if "longer" in cause]
    assert not list(collector.take_selection().alarms()), "each batch is told of once"


@pytest.mark.parametrize("options", [{"seed": 3}, {}])
def test_an_answer_that_was_cut_off_is_drawn_again_by_the_same_seed(collect: Collect, options: Any) -> None:
    engine = Sampler(has_seed=True, latency=30)
    engine.slow_requests = 1
    collector = collect(engine, request_timeout=0.2, **options)
    batch = collector.rollout_batch([{"number": 0}], Ask(lambda *_: 1.0))
    (first, again) = engine.asked
    assert first == again, "the request and its seed"
    assert first[1] is not None
    assert len(batch) == 1
    assert stats_tracker.export()["rollout/num_redrawn"] == 0


@pytest.mark.parametrize("change", ["no seed", "another version"])
def test_an_answer_that_may_differ_makes_a_group_redrawn_with_the_reason(collect: Collect, change: str) -> None:
    engine = Sampler(has_seed=change != "no seed", latency=30)
    engine.slow_requests = 1

    class Ahead(Ask):
        num_attempts = 0

        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
            self.num_attempts += 1
            if change == "another version" and self.num_attempts == 2:
                engine.set_version(1)
            return await super().arun_episode(engine, data)

    collector = collect(engine, request_timeout=0.2)
    collector.rollout_batch([{"number": number} for number in range(3)], Ahead(lambda *_: 1.0))
    stats = stats_tracker.export()
    assert (stats["rollout/num_redrawn"], stats["rollout/redrawn/CallTimeout"]) == (1, 1)
    assert [cause for cause, _ in collector.take_selection().alarms() if "drawn again" in cause]


def test_a_conversation_that_takes_another_course_is_redrawn(collect: Collect) -> None:
    class Wanders(RolloutWorkflow):
        num_attempts = 0

        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
            self.num_attempts += 1
            response = await engine.agenerate(LLMRequest(input_ids=[self.num_attempts], gconfig=GCONFIG))
            if self.num_attempts == 1:
                raise ValueError("the environment crashed")
            return trajectory(response, reward=1.0)

    collect(Sampler(), seed=1).rollout_batch([{}], Wanders())
    assert stats_tracker.export()["rollout/redrawn/ValueError"] == 1


def test_requests_of_one_attempt_that_run_side_by_side_get_their_own_answers(collect: Collect) -> None:
    seen: list[list[int]] = []

    class Twice(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
            request = LLMRequest(input_ids=[1], gconfig=GCONFIG)
            both = await asyncio.gather(*(engine.agenerate(request) for _ in range(2)))
            seen.append([token for response in both for token in response.output_tokens])
            if len(seen) == 1:
                raise ValueError("once")
            return trajectory(both[0], reward=1.0)

    engine = Sampler()
    collect(engine).rollout_batch([{}], Twice())
    assert seen[0] == seen[1]
    assert len(engine.asked) == 2


def test_chunks_of_an_answer_hold_all_of_it() -> None:
    answer = LLMResponse(
        input_tokens=[],
        output_tokens=[4, 5, 6],
        output_logprobs=[-1.0, -2.0, -3.0],
        output_versions=[1, 1, 2],
        sampling_logprobs=[-1.0, -2.0, -3.0],
        stop_reason="length",
        latency=0,
        ttft=0,
        extras={"kept_ids": [[4], [], [6, 7]]},
    )
    chunks = list(chunks_of(answer))
    assert [(chunk.version, chunk.finish_reason) for chunk in chunks] == [(1, None), (2, "length")]
    assert [token for chunk in chunks for token in chunk.token_ids] == answer.output_tokens
    assert [value for chunk in chunks for value in chunk.logprobs] == answer.output_logprobs
    assert [value for chunk in chunks for value in chunk.sampling_logprobs] == answer.sampling_logprobs
    assert [ids for chunk in chunks for ids in chunk.extras["kept_ids"]] == answer.extras["kept_ids"]
    nothing: dict[str, Any] = {name: [] for name in ("output_tokens", "output_logprobs", "output_versions")}
    empty = replace(answer, **nothing, sampling_logprobs=[], extras={}, stop_reason="abort")
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in chunks_of(empty)] == [([], "abort")]


def test_a_loop_that_never_asks_for_alarms_keeps_counts_and_not_answers() -> None:
    total = Selection()
    for _ in range(1000):
        total.add(Selection(failed=Counter([30, 30]), kept=Counter([10] * 100)))
    assert (len(total.failed), len(total.kept)) == (1, 1)
    assert total.lengths() == {"length_failed": 30, "length_kept": 10}
    assert [facts["failed"] for _, facts in total.alarms()] == ["2000, mean length 30 tokens"]


def test_episodes_that_fail_before_their_first_token_have_no_answer_whose_length_counts(collect: Collect) -> None:
    class Refuses(Ask):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
            if data["number"] % 2:
                raise ValueError("the environment is full")
            return await super().arun_episode(engine, data)

    collector = collect(Sampler(), max_consecutive_failures=1000)
    collector.rollout_batch([{"number": number} for number in range(20)], Refuses(lambda *_: 1.0))
    assert "rollout/length_failed" not in stats_tracker.export()
    assert not [cause for cause, _ in collector.take_selection().alarms() if "shorter" in cause]


def test_a_request_whose_extras_are_a_list_is_answered_and_known_again(collect: Collect) -> None:
    class Lists(Ask):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
            extras: Any = ["kept_ids"]
            response = await engine.agenerate(LLMRequest(input_ids=[1], gconfig=GCONFIG, extras=extras))
            return trajectory(response, reward=self.grade(data, 0, [*response.output_tokens]))

    engine, judge = Sampler(), Flaky()
    collect(engine).rollout_batch([{"number": 0}], Lists(judge))
    assert judge.seen[0][0] == judge.seen[0][1]
    assert len(engine.asked) == 1
