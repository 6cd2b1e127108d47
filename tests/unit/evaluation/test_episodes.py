"""Episodes of an evaluation, and what is done with those that have ended."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from tensordict import TensorDict

from rlite.evaluation.sets import EndedEpisode, EpisodeRunner, Place
from rlite.rollout import CollectorOptions, LLMRequest, RolloutWorkflow, ScriptedEngine, trajectory


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

    def write(ended: EndedEpisode) -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.05)  # others have ended meanwhile
        raise OSError("full")

    runner = EpisodeRunner(ScriptedEngine([[7, 8]]), AskTwice(), [{"turns": 1}] * 4, CollectorOptions(), 0, 4)
    with pytest.raises(OSError, match="full"):
        runner.run([Place(item, 0) for item in range(4)], write)
    assert calls == 1


def test_episodes_go_on_while_one_that_has_ended_is_written() -> None:
    workflow, waited = AskTwice(), []
    engine = ScriptedEngine([[7, 8]], latency=0.1)
    items = [{"turns": turns} for turns in (1, 2)]
    runner = EpisodeRunner(engine, workflow, items, CollectorOptions(), 0, 2)
    names = []

    def write(ended: EndedEpisode) -> None:
        names.append(threading.current_thread().name)
        waited.append(workflow.has_second_turn.wait(timeout=10))

    runner.run([Place(0, 0), Place(1, 0)], write)
    assert waited == [True, True]
    assert len(set(names)) == 1
