"""Speed-up of asynchronous rollouts on a long-tailed workload, compared with a simulation of the same schedule.

    python -m benchmarks.async_rollouts

Answers take log-normal times (sigma 1), a batch has 64, and the trainer takes the mean time of a synchronous batch. It
is run with the real collector and a scripted engine: synchronous; running ahead by one update with on_stale=wait; the
same with on_stale=drop. Each is compared with a discrete-event simulation of the same ledger, in which nothing but
answers and training takes time. Dropping favours short answers: the mean lengths kept and dropped are printed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from rlite.observability import stats_tracker
from rlite.rollout import (
    CollectorOptions,
    GenerationHyperparameters,
    LLMRequest,
    RolloutCollector,
    RolloutLedger,
    RolloutWorkflow,
    ScriptedEngine,
    trajectory,
)

MIN_SPEEDUP = {"wait": 1.6, "drop": 1.85}
MAX_DEVIATION = 0.05


class Workload:
    """Response times of the items 0, 1, 2, ...; the same in every run."""

    def __init__(self, batch_size: int, sigma: float, median_seconds: float, tokens_per_second: float) -> None:
        self.batch_size = batch_size
        self._draw = np.random.default_rng(0)
        self._sigma, self._median = sigma, median_seconds
        self._seconds: list[float] = []
        self.tokens_per_second = tokens_per_second
        trials = median_seconds * np.exp(sigma * np.random.default_rng(1).standard_normal((100_000, batch_size)))
        self.train_seconds = float(trials.max(1).mean())

    def seconds(self, item: int) -> float:
        """Return the seconds of the answer to an item."""
        while item >= len(self._seconds):
            self._seconds += list(self._median * np.exp(self._sigma * self._draw.standard_normal(1024)))
        return self._seconds[item]

    def num_tokens(self, item: int) -> int:
        """Return the tokens of the answer to an item."""
        return max(1, round(self.seconds(item) * self.tokens_per_second))


class OneAnswer(RolloutWorkflow):
    """Asks once."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        gconfig = GenerationHyperparameters(max_new_tokens=1 << 20)
        response = await engine.agenerate(LLMRequest(input_ids=[1], gconfig=gconfig, metadata=data))
        return trajectory(response, reward=0.0)


def run(workload: Workload, on_stale: str | None, num_steps: int) -> dict[str, float]:
    """`num_steps` steps with the real collector: roll out, train (sleep), update; on_stale None is synchronous."""
    engine = ScriptedEngine(
        lambda request: [2] * workload.num_tokens(request.metadata["item"]),
        latency=lambda request: workload.seconds(request.metadata["item"]),
    )
    options = CollectorOptions(
        consumer_batch_size=workload.batch_size, max_head_offpolicyness=1, on_stale=on_stale or "wait"
    )
    collector = RolloutCollector(engine, options)
    items = ({"item": number} for number in range(1 << 30))
    lengths: list[int] = []
    stats_tracker.export()
    begin = time.perf_counter()
    for step in range(num_steps):
        if on_stale is None:
            batch = collector.rollout_batch([next(items) for _ in range(workload.batch_size)], OneAnswer())
        else:
            batch = collector.prepare_batch(items, OneAnswer())
        lengths += batch["loss_mask"].sum(1).tolist()
        time.sleep(workload.train_seconds)
        engine.set_version(step + 1)
        collector.version_changed()
    seconds = time.perf_counter() - begin
    lost = collector.lost.total()
    collector.close()
    dropped = stats_tracker.export().get("rollout/length_dropped", 0.0)
    return {"seconds": seconds, "kept": statistics.mean(lengths), "num_dropped": lost, "dropped": dropped}


def simulate(workload: Workload, on_stale: str | None, num_steps: int) -> float:
    """The seconds that the same scheduler takes where nothing else costs time."""
    batch_size = workload.batch_size
    if on_stale is None:
        longest = [max(map(workload.seconds, range(s * batch_size, (s + 1) * batch_size))) for s in range(num_steps)]
        return sum(longest) + num_steps * workload.train_seconds
    ledger = RolloutLedger(
        batch_size=batch_size, max_head_offpolicyness=1, max_concurrent=batch_size, on_stale=on_stale
    )
    now, version, submitted = 0.0, 0, 0
    running: dict[int, float] = {}
    ends: list[tuple[float, int]] = []

    def admit() -> None:
        nonlocal submitted
        for group in ledger.too_old(version):
            ledger.drop(group, "too old")
            running.pop(group, None)
        while ledger.room(version) > 0:
            ledger.submit(submitted)
            submitted += 1
            group = ledger.start(version)
            running[group] = now + workload.seconds(group)
            heapq.heappush(ends, (running[group], group))

    def advance(until: float) -> Iterator[float]:
        while ends and ends[0][0] <= until:
            moment, group = heapq.heappop(ends)
            if running.pop(group, None) == moment:
                ledger.accept(group)
                yield moment

    for _ in range(num_steps):
        admit()
        while not ledger.is_ready(batch_size, version):
            now = next(advance(float("inf")))
            admit()
        ledger.consume(ledger.oldest(batch_size), version)
        trained = now + workload.train_seconds
        for moment in advance(trained):
            now = moment
            admit()
        now, version = trained, version + 1
    return now


def main() -> None:
    """Run, simulate, print; exits with 1 if a speed-up is too small, or too far from the simulation's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log-normal response times")
    parser.add_argument("--median-seconds", type=float, default=0.04, help="of a response")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = parser.parse_args()
    workload = Workload(args.batch_size, args.sigma, args.median_seconds, tokens_per_second=1000)
    rows: dict[str, dict[str, float]] = {}
    for name, on_stale in (("synchronous", None), ("wait", "wait"), ("drop", "drop")):
        measured = run(workload, on_stale, args.steps)
        measured["simulated"] = simulate(workload, on_stale, args.steps)
        measured["deviation"] = measured["seconds"] / measured["simulated"] - 1
        measured["speed-up"] = rows.get("synchronous", measured)["seconds"] / measured["seconds"]
        rows[name] = measured
    mean = statistics.mean(workload.num_tokens(item) for item in range(args.batch_size * args.steps))
    if args.json:
        print(json.dumps({"settings": vars(args), "rows": rows, "mean_length": mean}, indent=2))
    else:
        print(
            f"{args.steps} steps of {args.batch_size}, log-normal sigma {args.sigma}, median {args.median_seconds} s, "
            f"trainer {workload.train_seconds:.3f} s, max_head_offpolicyness 1, mean length {mean:.0f} tokens"
        )
        for name, row in rows.items():
            print(
                f"{name:12} {row['seconds']:7.2f} s (simulated {row['simulated']:7.2f}, {row['deviation']:+.1%})  "
                f"{row['speed-up']:.2f}x  kept {row['kept']:.0f} tokens each, dropped {row['num_dropped']:.0f} of "
                f"{row['dropped']:.0f} tokens so far"
            )
    failed = [
        name
        for name, row in rows.items()
        if abs(row["deviation"]) > MAX_DEVIATION or row["speed-up"] < MIN_SPEEDUP.get(name, 0)
    ]
    raise SystemExit(f"not as asked: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
