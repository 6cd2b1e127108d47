"""Overhead of an engine call, compared with a bare Ray actor call.

    python -m benchmarks.calls --calls 500

Both call a method that does nothing, in one worker process on the same local Ray, in turns; medians in milliseconds,
and what the engine adds: splitting and gathering arguments, naming workers in errors, watching for their death.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
from accelerate import init_empty_weights
from torch import nn

import rlite
from rlite.nn import BaseTrainModule

LIMIT_MS = 1.0


class Nothing(BaseTrainModule):
    """One weight, and a method that returns what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def materialization_source(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.zeros(1)}

    def echo(self, value: Any) -> Any:
        return value


@ray.remote
class BareActor:
    """The same method without an engine."""

    def echo(self, value: Any) -> Any:
        return value


def milliseconds(call: Callable[[Any], Any], num_calls: int) -> list[float]:
    """The duration of each of `num_calls` calls."""
    durations = []
    for number in range(num_calls):
        begin = time.perf_counter()
        call([number])
        durations.append((time.perf_counter() - begin) * 1e3)
    return durations


def main() -> None:
    """Parse, start, measure in turns, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300, help="calls of each side in one turn")
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = parser.parse_args()

    rlite.init(device="cpu", num_devices=2, launcher="ray", num_threads=1)
    with init_empty_weights():
        engine = rlite.RliteTrainEngine(Nothing())
    engine.build(data_parallel_size=1)
    actor = BareActor.options(num_cpus=0).remote()  # type: ignore[attr-defined]
    sides: dict[str, Callable[[Any], Any]] = {
        "engine": lambda value: engine.echo(rlite.NeedParallel(value)),
        "actor": lambda value: ray.get(actor.echo.remote(value)),
    }
    durations: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(args.repeats + 1):
        for name, call in sides.items():
            measured = milliseconds(call, args.calls)
            if repeat > 0:
                durations[name] += measured
    rlite.shutdown()

    medians = {name: statistics.median(values) for name, values in durations.items()}
    added = medians["engine"] - medians["actor"]
    result = {
        "settings": {**vars(args), "ray": ray.__version__, "torch": torch.__version__, "workers": 1},
        "engine_ms": medians["engine"],
        "actor_ms": medians["actor"],
        "added_ms": added,
        "limit_ms": LIMIT_MS,
        "ratio": medians["engine"] / medians["actor"],
    }
    if args.json:
        print(json.dumps(result))
        return
    print(f"settings: {result['settings']}")
    for name, values in durations.items():
        low, high = statistics.quantiles(values, n=10)[0], statistics.quantiles(values, n=10)[-1]
        print(f"{name:>7}: {medians[name]:.3f} ms (10% to 90%: {low:.3f} to {high:.3f})")
    print(f"an engine adds {added:.3f} ms to a call (limit {LIMIT_MS} ms); ratio {result['ratio']:.2f}")


if __name__ == "__main__":
    main()
