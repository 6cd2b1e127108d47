"""Episodes of an evaluation, and what is done with those that have ended."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from tensordict import TensorDict

from rlite.evaluation.episodes import run_episodes
from rlite.evaluation.sets import EvaluationSet
from rlite.rollout import CollectorOptions, LLMRequest, RolloutWorkflow, ScriptedEngine, trajectory
from rlite.rollout.collector.ended import Ended


class AskTwice(RolloutWorkflow):
    def __init__(self) -> None:
        self.has_second_turn = threading.Event()

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        response = await engine.agenerate(LLMRequest(input_ids=[1, 2]))
        if data["turns"] == 2:
            response = await engine.agenerate(LLMRequest(input_ids=[1, 2]))
            self.has_second_turn.set()
        return trajectory(response, reward=1.0)


def test_nothing_is_written_after_an_error() -> None:
    calls = 0

    def write(ended: Ended) -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.05)  # others have ended meanwhile
        raise OSError("full")

    engine, asked = ScriptedEngine([[7, 8]]), EvaluationSet("", [{"turns": 1}] * 4, AskTwice())
    with pytest.raises(OSError, match="full"):
        run_episodes(
            engine, asked, [(item, 0) for item in range(4)], CollectorOptions(max_concurrent_rollouts=4), write
        )
    assert calls == 1


def test_episodes_go_on_while_one_that_has_ended_is_written() -> None:
    workflow, waited = AskTwice(), []
    engine = ScriptedEngine([[7, 8]], latency=0.1)
    asked = EvaluationSet("", [{"turns": turns} for turns in (1, 2)], workflow)
    names = []

    def write(ended: Ended) -> None:
        names.append(threading.current_thread().name)
        waited.append(workflow.has_second_turn.wait(timeout=10))

    run_episodes(engine, asked, [(item, 0) for item in range(2)], CollectorOptions(max_concurrent_rollouts=2), write)
    assert waited == [True, True]
    assert len(set(names)) == 1
