"""Progress of the call that waits for episodes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rlite.rollout import (
    CollectorOptions,
    GenerationHyperparameters,
    LLMRequest,
    RolloutCollector,
    RolloutWorkflow,
    ScriptedEngine,
    trajectory,
)

GCONFIG = GenerationHyperparameters(max_new_tokens=8)


class Gated(RolloutWorkflow):
    """Generates 3 tokens; items with `waits` wait for the gate afterwards."""

    def __init__(self) -> None:
        self.gate, self.has_generated = threading.Event(), threading.Semaphore(0)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        response = await engine.agenerate(LLMRequest(input_ids=[1], gconfig=GCONFIG))
        if data["waits"]:
            self.has_generated.release()
            while not self.gate.is_set():
                await asyncio.sleep(0.001)
        return trajectory(response, reward=1.0)


@pytest.fixture
def collector() -> Iterator[RolloutCollector]:
    engine = ScriptedEngine(lambda request: [7, 8, 9])
    collector = RolloutCollector(engine, CollectorOptions(consumer_batch_size=2, max_head_offpolicyness=1))
    yield collector
    collector.close()


def items(*waits: bool) -> list[dict[str, bool]]:
    return [{"waits": each} for each in waits]


@pytest.mark.parametrize("call", ["rollout", "evaluation", "ahead"])
def test_a_call_says_how_many_episodes_and_tokens_it_has(collector: RolloutCollector, call: str) -> None:
    assert collector.progress is None
    workflow, size = Gated(), 2
    calls = {
        "rollout": lambda: collector.rollout_batch(items(True, False), workflow, size),
        "evaluation": lambda: collector.evaluate(items(True, False), workflow, size),
        "ahead": lambda: collector.prepare_batch([items(True, False)], workflow, group_size=size),
    }
    caller = threading.Thread(target=calls[call])
    caller.start()
    for _ in range(2):
        assert workflow.has_generated.acquire(timeout=30)
    reached = threading.Event()
    while not reached.wait(0.001):
        progress = collector.progress
        assert progress is not None
        if progress.num_finished >= 2:
            reached.set()
    kind = "evaluation" if call == "evaluation" else "rollout"
    assert (progress.what, progress.num_episodes, progress.num_finished) == (kind, 4, 2) or call == "ahead"
    assert progress.num_tokens >= 12
    assert str(progress).startswith(f"{kind}: {progress.num_finished} of 4 episodes, {progress.num_tokens} tokens")
    workflow.gate.set()
    caller.join(timeout=30)
    assert not caller.is_alive()
    assert collector.progress is None


def test_a_call_that_fails_has_no_progress_afterwards(collector: RolloutCollector) -> None:
    class Failing(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            raise ValueError("no")

    with pytest.raises(Exception, match="ValueError"):
        collector.rollout_batch(items(False), Failing())
    assert collector.progress is None
