"""Speed of this tree beside another revision of it, in one run: generation, a GRPO step, rewards.

    python -m benchmarks.versions REVISION [--rounds 3]

The revision is checked out beside this tree. Rounds alternate; every figure is the median of its rounds, and the ratio
is this tree / revision. CPU seconds are of this process alone, so that a busy machine disturbs them less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rlite
from benchmarks.grpo import MAX_NEW_TOKENS, ours
from benchmarks.model import build_model
from rlite import RliteInferenceEngine
from rlite.rollout import RewardFunction

ROOT = Path(__file__).parents[1]
NUM_REWARDS = 4_000
NUM_EXEC_REWARDS = 200
CALL = {"prompt": "2+2=", "completions": "4", "prompt_ids": [1, 2], "completion_ids": [3]}


def equal(completions: str, answer: str, **row: Any) -> float:
    return float(completions.strip() == answer)


def executed(completions: str, answer: str, **row: Any) -> float:
    names: dict[str, Any] = {}
    exec(f"def solve():\n    return {completions}", names)
    return float(str(names["solve"]()) == answer)


@contextmanager
def timed(found: dict[str, float], name: str, per: float) -> Iterator[None]:
    """Note the wall and the CPU seconds of the block, divided by `per`."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    found[f"{name}, wall"] = (time.perf_counter() - wall) / per
    found[f"{name}, CPU"] = (time.process_time() - cpu) / per


def generate(model: Path, found: dict[str, float]) -> None:
    rlite.init(num_devices=1, num_threads=1)
    engine = RliteInferenceEngine(model)
    engine.build(max_model_len=256, max_num_seqs=64)
    prompts = json.loads((model / "prompts.json").read_text())
    prompts = [prompts[index % len(prompts)] for index in range(64)]
    sampling = {"temperature": 1.0, "max_tokens": MAX_NEW_TOKENS, "ignore_eos": True}
    engine.generate(prompts[:8], sampling)
    with timed(found, "generation, seconds per 1,000 tokens", len(prompts) * MAX_NEW_TOKENS / 1000):
        engine.generate(prompts, sampling)
    rlite.shutdown()


def reward(fn: Callable[..., float], count: int, name: str, found: dict[str, float]) -> None:
    async def all_of_them(function: RewardFunction, number: int) -> None:
        rewards = await asyncio.gather(*(function(**CALL, answer="4") for _ in range(number)))
        assert set(rewards) == {1.0}

    function = RewardFunction(fn)
    asyncio.run(all_of_them(function, count))  # processes start, and calls learn to travel together
    with timed(found, f"{name}, milliseconds each", count / 1000):
        asyncio.run(all_of_them(function, count))


def measure(model: Path) -> dict[str, float]:
    """One round, in the tree that this process has on its path."""
    found: dict[str, float] = {}
    generate(model, found)
    with tempfile.TemporaryDirectory() as scratch:
        step = ours(model, Path(scratch) / "run", steps=4, threads=1)
    found["GRPO step, seconds, wall"], found["GRPO step, seconds, CPU"] = (
        step["seconds_per_step"],
        step["cpu_seconds_per_step"],
    )
    reward(equal, NUM_REWARDS, "reward", found)
    reward(executed, NUM_EXEC_REWARDS, "reward that calls exec", found)
    return found


def measure_in(tree: Path, model: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    # this file measures both, whatever the revision has in its place
    command = [sys.executable, str(Path(__file__)), "--measure", str(model)]
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default="HEAD~1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        other, model = Path(scratch) / "tree", Path(scratch) / "model"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, args.revision], cwd=ROOT, check=True)
        try:
            build_model(model, stop_probability=0.0235)
            rounds = []
            for number in range(args.rounds):
                rounds.append((measure_in(ROOT, model), measure_in(other, model)))
                print(f"round {number + 1} of {args.rounds}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    print(f"{'':<48}{'this tree':>12}{args.revision[:12]:>14}{'ratio':>8}")
    for name in rounds[0][0]:
        mine, theirs = (statistics.median(side[name] for side in sides) for sides in zip(*rounds, strict=True))
        print(f"{name:<48}{mine:>12.4f}{theirs:>14.4f}{mine / theirs:>8.2f}")


if __name__ == "__main__":
    main()
