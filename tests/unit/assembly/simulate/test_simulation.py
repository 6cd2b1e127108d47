"""The simulation takes the same batches at the same times as the collector."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from rlite.assembly.simulate.options import SimulatedRollouts
from rlite.assembly.simulate.simulation import Sample, Simulation, Step, Template, Workload
from rlite.rollout import (
    CollectorOptions,
    LLMRequest,
    RolloutCollector,
    RolloutWorkflow,
    ScriptedEngine,
    trajectory,
)
from tests.virtual_time import Clock, loop_of, virtual_time

STEPS = 25
LEARN, SYNC, BETWEEN = 1.0, 0.25, 0.125


class OneAnswer(RolloutWorkflow):
    """Asks once. Some items fail at their end."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        response = await engine.agenerate(LLMRequest(input_ids=[1], metadata=data))
        if data["fails"]:
            raise LookupError("no answer")
        return trajectory(response, reward=1.0)


def latencies(seed: int) -> list[tuple[float, bool]]:
    rng = random.Random(seed)
    return [(rng.lognormvariate(0.0, 1.0), rng.random() < 0.1) for _ in range(4000)]


def collected(limits: SimulatedRollouts, size: int, drawn: list[tuple[float, bool]]) -> list[tuple[float, list[int]]]:
    """Time and groups of each batch of the collector."""
    found = []
    with virtual_time(Clock()) as clock:
        engine = ScriptedEngine([[5] * 500], latency=lambda request: request.metadata["seconds"])
        given = limits.model_dump(exclude={"tp_size", "max_num_seqs", "max_refills"})
        options = CollectorOptions(
            **given | {"request_retries": 0, "max_consecutive_failures": 10**6}, consumer_batch_size=size
        )
        collector = RolloutCollector(engine, options)
        items = [{"seconds": seconds, "fails": fails} for seconds, fails in drawn]
        loader = ([*chunk] for chunk in itertools.batched(items, size)) if hasattr(itertools, "batched") else None
        loader = loader or (items[at : at + size] for at in range(0, len(items), size))
        for step in range(STEPS):
            batch = collector.prepare_batch(loader, OneAnswer())
            found.append((clock.now, batch["group_ids"].tolist()))
            loop_of(collector).sleep(LEARN)
            engine.pause()
            loop_of(collector).sleep(SYNC)
            engine.set_version(step + 1)
            engine.resume()
            collector.version_changed()
            loop_of(collector).sleep(BETWEEN)
        collector.close()
    return found


class InOrder:
    """Draws the groups in the order in which the collector gets its items."""

    def __init__(self, size: int) -> None:
        self._places = itertools.count(0, size)

    def choice(self, values: Any) -> Any:
        return values[0]

    def randrange(self, stop: int) -> int:
        return next(self._places)


def simulated(limits: SimulatedRollouts, size: int, drawn: list[tuple[float, bool]]) -> list[tuple[float, list[int]]]:
    """Time and groups of each batch of the simulation."""
    found = []

    class Noting(Simulation):
        def next_batch(self) -> list[int]:
            batch = super().next_batch()
            found.append((self.now, batch))
            return batch

    templates = [Template([Sample(seconds, 0.0, 1.0)], "failed" if fails else "") for seconds, fails in drawn]
    workload = Workload(
        templates=templates,
        steps=[Step(LEARN, SYNC, BETWEEN, 1.0)],
        limits=limits,
        batch_size=size,
        num_replicas=1,
        num_lost=0,
        slowdown=0.0,
        token_share=0.0,
    )
    simulation = Noting(workload)
    simulation._rng = InOrder(size)  # type: ignore[assignment]
    simulation.run(STEPS)
    return found


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
@pytest.mark.parametrize("eta", [1, 2, 4])
@pytest.mark.parametrize(("size", "concurrent"), [(4, None), (4, 10), (1, 3), (8, 5)])
def test_batches_are_those_of_the_collector(on_stale: Any, eta: int, size: int, concurrent: int | None) -> None:
    limits = SimulatedRollouts(max_head_offpolicyness=eta, on_stale=on_stale, max_concurrent_rollouts=concurrent)
    drawn = latencies(eta)
    expected, found = collected(limits, size, drawn), simulated(limits, size, drawn)
    assert [groups for _, groups in found] == [groups for _, groups in expected]
    assert [at for at, _ in found] == pytest.approx([at for at, _ in expected], abs=1e-6)
