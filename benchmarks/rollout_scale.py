"""CPU time and memory of an episode in flight, with very many of them at once.

    python -m benchmarks.rollout_scale --episodes 10000

Every episode asks a scripted engine once, whose answers take so long that all episodes are in flight together, and has
a reward that needs no process. The time is this process's CPU time from the submission to the batch, the scripted
engine's included; the memory is what the process has grown by when all of them are in flight.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import psutil

from rlite.rollout import (
    CollectorOptions,
    GenerationHyperparameters,
    LLMRequest,
    RolloutCollector,
    RolloutWorkflow,
    ScriptedEngine,
    trajectory,
)

MAX_MILLISECONDS = 1.0
MAX_KILOBYTES = 20.0
NUM_TOKENS = 8


class OneAnswer(RolloutWorkflow):
    """Asks once."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        gconfig = GenerationHyperparameters(max_new_tokens=NUM_TOKENS)
        response = await engine.agenerate(LLMRequest(input_ids=[1, 2, 3], gconfig=gconfig))
        return trajectory(response, reward=float(data["number"] % 2))


def run(num_episodes: int, seconds: float) -> dict[str, float]:
    """All episodes at once; what each of them costs."""
    engine = ScriptedEngine([list(range(NUM_TOKENS))], latency=seconds)
    options = CollectorOptions(max_concurrent_rollouts=num_episodes, consumer_batch_size=num_episodes)
    collector = RolloutCollector(engine, options)
    collector.rollout_batch([{"number": 0}], OneAnswer())  # warm
    process = psutil.Process()
    before, started = process.memory_info().rss, time.process_time()
    items = [{"number": number} for number in range(num_episodes)]
    workflow = OneAnswer()
    for item in items:
        collector.submit(item, workflow)
    while collector.counters.running < num_episodes:
        time.sleep(0.05)
        assert not collector.counters.ready, "the answers came before all were asked: give more --seconds"
    grown = process.memory_info().rss - before
    batch = collector.wait(num_episodes)
    cpu = time.process_time() - started
    assert len(batch) == num_episodes
    collector.close()
    return {"milliseconds": cpu / num_episodes * 1e3, "kilobytes": grown / num_episodes / 1e3}


def main() -> None:
    """Run, print; exits with 1 if an episode costs too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=15.0, help="that an answer takes")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = parser.parse_args()
    found = run(args.episodes, args.seconds)
    if args.json:
        print(json.dumps({"settings": vars(args), **found}, indent=2))
    else:
        print(
            f"{args.episodes} episodes in flight: {found['milliseconds']:.3f} ms (at most {MAX_MILLISECONDS}) and "
            f"{found['kilobytes']:.1f} kB (at most {MAX_KILOBYTES}) each"
        )
    raise SystemExit(found["milliseconds"] > MAX_MILLISECONDS or found["kilobytes"] > MAX_KILOBYTES)


if __name__ == "__main__":
    main()
