"""Speed of this tree beside another revision of it, in one run.

    python -m benchmarks.versions REVISION [--rounds 3] [--only sft sync]

The revision is checked out beside this tree. Rounds alternate; every figure is the median of its rounds, and the ratio
is this tree / revision: below 1, this tree is faster. Each section runs in a process of its own. CPU seconds are of
that process alone, so that a busy machine disturbs them less. Weight syncs last for milliseconds, so both trees stay
ready and alternate sync by sync; their ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import init_empty_weights

import rlite
from benchmarks import grpo, sft, weight_sync
from benchmarks.model import build_model
from rlite import RliteInferenceEngine
from rlite.rollout import RewardFunction

ROOT = Path(__file__).parents[1]
NUM_REWARDS = 4_000
NUM_EXEC_REWARDS = 200
NUM_CALLS = 5
NUM_SYNCS = 20
WARM_UP_SYNCS = 3
SYNC_MEGABYTES = 256
ANSWER = "answer:"
CALL = {"prompt": "2+2=", "completions": "4", "prompt_ids": [1, 2], "completion_ids": [3]}


def equal(completions: str, answer: str, **row: Any) -> float:
    return float(completions.strip() == answer)


def executed(completions: str, answer: str, **row: Any) -> float:
    names: dict[str, Any] = {}
    exec(f"def solve():\n    return {completions}", names)
    return float(str(names["solve"]()) == answer)


Figures = dict[str, float]
"""seconds by name"""


@contextmanager
def timed(figures: Figures, name: str, per: float) -> Iterator[None]:
    """Note the wall and the CPU seconds of the block, divided by `per`, without a full garbage collection in it."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    figures[f"{name}, wall"] = (time.perf_counter() - wall) / per
    figures[f"{name}, CPU"] = (time.process_time() - cpu) / per


def medians(found: list[Figures]) -> Figures:
    return {name: statistics.median(figures[name] for figures in found) for name in found[0]}


def generation(model: Path, scratch: Path) -> Figures:
    rlite.init(num_devices=1, num_threads=1)
    engine = RliteInferenceEngine(model)
    engine.build(max_model_len=256, max_num_seqs=64)
    prompts = json.loads((model / "prompts.json").read_text())
    prompts = [prompts[index % len(prompts)] for index in range(64)]
    sampling = {"temperature": 1.0, "max_tokens": grpo.MAX_NEW_TOKENS, "ignore_eos": True}
    engine.generate(prompts, sampling)
    found: list[Figures] = []
    for _ in range(NUM_CALLS):
        found.append({})
        with timed(found[-1], "generation, per 1,000 tokens", len(prompts) * grpo.MAX_NEW_TOKENS / 1000):
            engine.generate(prompts, sampling)
    rlite.shutdown()
    return medians(found)


def grpo_step(model: Path, scratch: Path) -> Figures:
    step = grpo.ours(model, scratch / "run", steps=6, threads=1)
    return {"GRPO step, wall": step["seconds_per_step"], "GRPO step, CPU": step["cpu_seconds_per_step"]}


def sft_tokens(model: Path, scratch: Path) -> Figures:
    args = argparse.Namespace(threads=1, steps=6, max_length_per_device=2048)
    rates = sft.ours(model, sft.build_rows((args.steps + 4) * sft.ROWS_PER_STEP), scratch / "run", args)
    return {
        "SFT, per 1,000 tokens, wall": 1000 / rates["tokens_per_second"],
        "SFT, per 1,000 tokens, CPU": 1000 / rates["tokens_per_cpu_second"],
    }


def program(name: str, *arguments: str) -> Any:
    """Run a benchmark of the tree that is on the path. Its exit code tells only about its own limits."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *arguments]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)


def rollout_scale(model: Path, scratch: Path) -> Figures:
    return {"rollout_scale, per episode, CPU": program("rollout_scale")["milliseconds"] / 1000}


def async_rollouts(model: Path, scratch: Path) -> Figures:
    rows = program("async_rollouts", "--steps", "40")["rows"]
    return {f"async_rollouts, {name}": row["seconds"] for name, row in rows.items()}


def rewards(model: Path, scratch: Path) -> Figures:
    return {
        **reward(equal, NUM_REWARDS, "reward"),
        **reward(executed, NUM_EXEC_REWARDS, "reward that calls exec"),
    }


def reward(fn: Callable[..., float], count: int, name: str) -> Figures:
    async def all_of_them(function: RewardFunction, number: int) -> None:
        values = await asyncio.gather(*(function(**CALL, answer="4") for _ in range(number)))
        assert set(values) == {1.0}

    function = RewardFunction(fn)
    asyncio.run(all_of_them(function, count))  # processes start, and calls learn to travel together
    found: list[Figures] = []
    for _ in range(NUM_CALLS):
        found.append({})
        with timed(found[-1], f"{name}, per 1,000", count / 1000):
            asyncio.run(all_of_them(function, count))
    return medians(found)


def serve_syncs(checkpoint: str, workers: int) -> None:
    """Sync weights once for every line that arrives, and answer with the seconds."""
    rlite.init(device="cpu", num_devices=2, launcher="ray", num_threads=1)
    target = RliteInferenceEngine(checkpoint)
    target.build(tensor_parallel_size=workers, data_parallel_size=1, max_model_len=16, max_num_seqs=1)
    with init_empty_weights():
        source = rlite.RliteTrainEngine(weight_sync.Policy.from_pretrained(checkpoint))
    source.build(tensor_parallel_size=workers, data_parallel_size=1, colocate_with=target)
    for _ in range(WARM_UP_SYNCS):
        source.p2p_weight_sync(target)
    print(ANSWER, "ready", flush=True)
    for _ in sys.stdin:
        print(ANSWER, source.p2p_weight_sync(target).seconds, flush=True)
    rlite.shutdown()


SECTIONS: dict[str, Callable[[Path, Path], Figures]] = {
    "generation": generation,
    "grpo": grpo_step,
    "sft": sft_tokens,
    "rollout_scale": rollout_scale,
    "async_rollouts": async_rollouts,
    "rewards": rewards,
}


def process_in(tree: Path, *arguments: str) -> tuple[list[str], dict[str, Any]]:
    """Return the command and the options of a process that runs this file with the code of a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    # this file measures both, whatever the revision has in its place
    return [sys.executable, str(Path(__file__)), *arguments], {"env": environment, "cwd": tree, "text": True}


def measure_in(tree: Path, section: str, model: Path) -> Figures:
    command, options = process_in(tree, "--measure", section, str(model))
    done = subprocess.run(command, **options, capture_output=True, check=True)
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default="HEAD~1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS, "sync"], default=[*SECTIONS, "sync"])
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--serve-syncs", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_syncs:
        serve_syncs(args.serve_syncs[0], int(args.serve_syncs[1]))
        return
    with tempfile.TemporaryDirectory() as scratch:
        if args.measure:
            section, model = args.measure
            print(json.dumps(SECTIONS[section](Path(model), Path(scratch))))
            return
        other, built = Path(scratch) / "tree", Path(scratch) / "model"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, args.revision], cwd=ROOT, check=True)
        try:
            build_model(built, stop_probability=0.0235)
            print(f"{'seconds':<42}{'this tree':>12}{args.revision[:12]:>14}{'ratio':>8}", flush=True)
            for section in args.only:
                if section == "sync":
                    compare_syncs(other, Path(scratch) / "synced", args.rounds)
                else:
                    compare(section, other, built, args.rounds)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)


def compare(section: str, other: Path, model: Path, rounds: int) -> None:
    """Measure one section in both trees in turns, and print a line for each of its figures."""
    found: dict[Path, list[Figures]] = {ROOT: [], other: []}
    for number in range(rounds):
        for tree in (ROOT, other) if number % 2 else (other, ROOT):  # else one of them always finds a warmer machine
            found[tree].append(measure_in(tree, section, model))
    mine, theirs = medians(found[ROOT]), medians(found[other])
    for name, seconds in mine.items():
        show(name, seconds, theirs[name], seconds / theirs[name])


def compare_syncs(other: Path, checkpoint: Path, rounds: int) -> None:
    """Sync weights in both trees in turns, between processes that stay for a round."""
    weight_sync.build_checkpoint(checkpoint, SYNC_MEGABYTES)
    for workers in weight_sync.LEAST:
        found: dict[Path, list[float]] = {ROOT: [], other: []}
        for number in range(rounds):
            with ExitStack() as stack:
                trees = (ROOT, other) if number % 2 else (other, ROOT)
                syncs = {tree: stack.enter_context(syncing(tree, checkpoint, workers)) for tree in trees}
                seconds: dict[Path, list[float]] = {tree: [] for tree in trees}
                for repeat in range(NUM_SYNCS):
                    for tree in trees if repeat % 2 else trees[::-1]:
                        seconds[tree].append(syncs[tree]())
            for tree in trees:
                found[tree].append(statistics.median(seconds[tree]))
        mine, theirs = found[ROOT], found[other]
        ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        name = f"weight sync of {SYNC_MEGABYTES} MiB, {workers} to {workers}"
        show(name, statistics.median(mine), statistics.median(theirs), ratio)


@contextmanager
def syncing(tree: Path, checkpoint: Path, workers: int) -> Iterator[Callable[[], float]]:
    """Yield a function that syncs weights once in a process of this tree and returns the seconds."""
    command, options = process_in(tree, "--serve-syncs", str(checkpoint), str(workers))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **options, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def answer() -> str:
            return next(line for line in process.stdout if line.startswith(ANSWER)).removeprefix(ANSWER)

        def sync() -> float:
            process.stdin.write("\n")
            process.stdin.flush()
            return float(answer())

        answer()
        yield sync
        process.stdin.close()


def show(name: str, seconds: float, theirs: float, ratio: float) -> None:
    print(f"{name:<42}{seconds:>12.4f}{theirs:>14.4f}{ratio:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
