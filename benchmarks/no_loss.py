"""Proof that this tree is as fast as another revision: alternating pairs of equal work, and an interval of their ratio.

    python -m benchmarks.no_loss REVISION [--pairs 40] [--only sft sync]

Both trees are checked out under paths of one length, because the length of an environment moves the stack. They stay
ready in processes of their own, and do one unit of work in turns. A unit is the same work in both: completions have a
fixed length. Its cost is the CPU time of its process and of the processes below it, which other work on the machine
disturbs less than wall time; `benchmarks.weight_sync` compares the wall time of a sync with that of memcpy. Both
processes are new after every 4 pairs, because the place that a process finds in memory makes all of its units faster or
slower by some percent. Which tree starts first does so, too (4 % for syncs), so the trees take turns at it.
The interval is Student's, of the mean logarithm of the ratio this tree / revision, with a value for every 8 pairs, in
which each tree has started first once.
The exit status is 1 if an upper end is 1.03 or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
import transformers
from accelerate import init_empty_weights

import rlite
from benchmarks import grpo, rollout_scale, sft, weight_sync
from benchmarks.model import build_model
from benchmarks.versions import ANSWER, CALL, ROOT
from rlite import RliteInferenceEngine
from rlite.rollout import CollectorOptions, RewardFunction, RolloutCollector, ScriptedEngine, SingleTurnWorkflow
from rlite.trainer.model.options import ModelOptions
from rlite.trainer.options import TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from rlite.trainer.sft import SftTrainer
from rlite.trainer.supervised_options import AnsweringOptions, DataOptions, SftConfig
from rlite.types import GenerationHyperparameters

LIMIT = 1.03
WARM_UP = 3
PAIRS_OF_A_PROCESS = 4
PAIRS_OF_A_VALUE = 2 * PAIRS_OF_A_PROCESS
"""in half of them the one tree starts first, in half of them the other"""
NUM_TOKENS = 32
NUM_EPISODES = 1_000
TURNS = {"episodes": 8}
"""units that make a pair, else one: every third unit of episodes has a full garbage collection"""
NUM_ROWS = 16
NUM_SYNCS = 20
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
"""memory that glibc has freed stays in the process: else some processes of one tree fault in six times more pages"""
Unit = Callable[[], None]
"""does one unit of work; returns its cost if it measures the cost itself"""


def equal(completions: str, answer: str, **row: Any) -> float:
    return float(completions.strip() == answer)


def executed(completions: str, answer: str, **row: Any) -> float:
    names: dict[str, Any] = {}
    exec(f"def solve():\n    return {completions}", names)
    return float(str(names["solve"]()) == answer)


@contextmanager
def generation(model: Path, scratch: Path) -> Iterator[Unit]:
    rlite.init(num_devices=1, num_threads=1)
    engine = RliteInferenceEngine(model)
    engine.build(max_model_len=256, max_num_seqs=64)
    prompts = json.loads((model / "prompts.json").read_text())[:64]
    sampling = {"temperature": 1.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}

    def unit() -> None:
        for _ in range(4):  # a clock that ticks in hundredths of a second must not decide
            engine.generate(prompts, sampling)

    yield unit
    rlite.shutdown()


@contextmanager
def grpo_step(model: Path, scratch: Path) -> Iterator[Unit]:
    rlite.init(num_devices=1, num_threads=1)
    prompts = json.loads((model / "prompts.json").read_text())
    options = PpoConfig(
        actor=ActorOptions(model_name=str(model), lr=1e-6),
        train_data=PromptOptions(prompts_per_rollout=8, responses_per_prompt=8),
        rollout=RolloutOptions(max_model_len=256),
        trainer=TrainerOptions(
            save_dir=str(scratch), total_steps=10**5, save_freq=10**6, test_freq=10**6, record="none"
        ),
    )
    gconfig = GenerationHyperparameters(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    workflow = SingleTurnWorkflow(RewardFunction(grpo.share_of_even_tokens), gconfig, tokenizer)
    trainer = PpoTrainer(options, workflow, [{"input_ids": prompt} for prompt in prompts])
    trainer.start()

    def unit() -> None:
        trainer.update(trainer.with_advantages(trainer.rollouts.next_batch()))
        trainer.sync()
        trainer.run.step += 1

    yield unit
    rlite.shutdown()


@contextmanager
def sft_step(model: Path, scratch: Path) -> Iterator[Unit]:
    rlite.init(num_devices=1, num_threads=1)
    options = SftConfig(
        actor=ModelOptions(model_name=str(model), lr=1e-6, gradient_checkpointing=False, max_length_per_device=2048),
        data=DataOptions(path="", batch_size=NUM_ROWS),
        trainer=AnsweringOptions(save_dir=str(scratch), save_freq=10**6, test_freq=10**6),
    )
    trainer = SftTrainer(options, sft.token_rows(sft.build_rows(NUM_ROWS)))  # one batch, again and again
    trainer.start()
    batches = cycle([next(iter(trainer.loader))])

    def unit() -> None:
        trainer.update(trainer.prepare(next(batches)))

    yield unit
    rlite.shutdown()


@contextmanager
def episodes(model: Path, scratch: Path) -> Iterator[Unit]:
    engine = ScriptedEngine([list(range(rollout_scale.NUM_TOKENS))])
    collector = RolloutCollector(
        engine, CollectorOptions(max_concurrent_rollouts=NUM_EPISODES, consumer_batch_size=NUM_EPISODES)
    )
    items, workflow = [{"number": number} for number in range(NUM_EPISODES)], rollout_scale.OneAnswer()

    def unit() -> None:
        collector.rollout_batch(items, workflow)

    yield unit
    collector.close()


def reward(fn: Callable[..., float], count: int) -> Callable[[Path, Path], contextmanager]:
    @contextmanager
    def section(model: Path, scratch: Path) -> Iterator[Unit]:
        function = RewardFunction(fn)

        async def all_of_them() -> None:
            values = await asyncio.gather(*(function(**CALL, answer="4") for _ in range(count)))
            assert set(values) == {1.0}

        def unit() -> None:
            asyncio.run(all_of_them())

        yield unit

    return section


@contextmanager
def sync(model: Path, scratch: Path) -> Iterator[Unit]:
    checkpoint = model.with_name("synced")
    rlite.init(device="cpu", num_devices=2, launcher="ray", num_threads=1)
    target = RliteInferenceEngine(str(checkpoint))
    target.build(tensor_parallel_size=2, data_parallel_size=1, max_model_len=16, max_num_seqs=1)
    with init_empty_weights():
        source = rlite.RliteTrainEngine(weight_sync.Policy.from_pretrained(str(checkpoint)))
    source.build(tensor_parallel_size=2, data_parallel_size=1, colocate_with=target)

    def unit() -> None:
        for _ in range(NUM_SYNCS):
            source.p2p_weight_sync(target)

    yield unit
    rlite.shutdown()


SECTIONS = {
    "generation": generation,
    "grpo": grpo_step,
    "sft": sft_step,
    "episodes": episodes,
    "rewards": reward(equal, 8_000),
    "exec_rewards": reward(executed, 300),
    "sync": sync,
}


def cpu_seconds() -> float:
    """CPU time of this process, of the processes below it, and of those that have ended."""
    me = psutil.Process()
    total = sum(me.cpu_times()[:4])
    for child in me.children(recursive=True):
        try:
            total += sum(child.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def serve(section: str, model: Path) -> None:
    """Do a unit of work for every line that arrives, and answer with its cost."""
    with tempfile.TemporaryDirectory() as scratch, SECTIONS[section](model, Path(scratch)) as unit:
        for _ in range(WARM_UP):
            unit()
        print(ANSWER, "ready", flush=True)
        for _ in sys.stdin:
            before = cpu_seconds()
            unit()
            print(ANSWER, cpu_seconds() - before, flush=True)


@contextmanager
def serving(tree: Path, section: str, model: Path) -> Iterator[Callable[[], float]]:
    """Yield a function that does a unit of work in a process of this tree and returns its cost."""
    command = [sys.executable, str(Path(__file__)), "--serve", section, str(model)]
    environment = {**os.environ, **KEPT_MEMORY, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, cwd=tree, text=True, **pipes) as process:

        def answer() -> str:
            for line in process.stdout:
                if line.startswith(ANSWER):
                    return line.removeprefix(ANSWER)
            raise RuntimeError(f"{tree}: {section} ended with {process.wait()}; run `{' '.join(command)}` there")

        def unit() -> float:
            process.stdin.write("\n")
            process.stdin.flush()
            return float(answer())

        answer()
        yield unit
        process.stdin.close()


def students_t(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t, by the first four terms of its expansion (within 0.004 from 3 on)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def compare(section: str, own: Path, other: Path, model: Path, pairs: int) -> bool:
    """Measure one section in both trees in turns, print its line, and return whether nothing is lost."""
    found: dict[Path, list[float]] = {own: [], other: []}
    for start in range(0, pairs, PAIRS_OF_A_PROCESS):
        with ExitStack() as stack:
            # the process that starts first finds other memory than the second
            order = (own, other) if start // PAIRS_OF_A_PROCESS % 2 else (other, own)
            units = {tree: stack.enter_context(serving(tree, section, model)) for tree in order}
            for number in range(start, start + PAIRS_OF_A_PROCESS):
                costs = dict.fromkeys(found, 0.0)
                for turn in range(number, number + TURNS.get(section, 1)):
                    for tree in (own, other) if turn % 2 else (other, own):  # else one always finds a warmer machine
                        costs[tree] += units[tree]()
                for tree, cost in costs.items():
                    found[tree].append(cost)
        ratio = math.exp(statistics.mean(map(math.log, found[own])) - statistics.mean(map(math.log, found[other])))
        print(f"{section}: {len(found[own])} of {pairs} pairs, {ratio:.3f} so far", file=sys.stderr, flush=True)
    logs = [math.log(mine / theirs) for mine, theirs in zip(found[own], found[other], strict=True)]
    means = [statistics.mean(logs[start : start + PAIRS_OF_A_VALUE]) for start in range(0, pairs, PAIRS_OF_A_VALUE)]
    margin = students_t(len(means) - 1) * statistics.stdev(means) / math.sqrt(len(means))
    low, middle, high = (math.exp(statistics.mean(means) + sign * margin) for sign in (-1, 0, 1))
    mine, theirs = statistics.median(found[own]), statistics.median(found[other])
    print(f"{section:<14}{mine:>12.4f}{theirs:>14.4f}{middle:>8.3f}   [{low:.3f}, {high:.3f}]", flush=True)
    return high < LIMIT


def git(*arguments: str, check: bool = True) -> str:
    """Run git in this tree, and return what it prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=check, capture_output=True, text=True).stdout.strip()


def check_out(tree: Path, revision: str) -> None:
    """Make a worktree of a revision."""
    git("worktree", "add", "--quiet", "--detach", str(tree), revision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default="HEAD~1")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pairs % PAIRS_OF_A_VALUE or args.pairs < 2 * PAIRS_OF_A_VALUE:
        parser.error(f"--pairs={args.pairs}: expected a multiple of {PAIRS_OF_A_VALUE}, twice that or more")
    if args.serve:
        serve(args.serve[0], Path(args.serve[1]))
        return
    with tempfile.TemporaryDirectory() as scratch:
        own, other, model = (Path(scratch) / name for name in ("tree", "then", "model"))
        try:
            check_out(own, git("stash", "create") or "HEAD")
            check_out(other, args.revision)
            build_model(model)
            weight_sync.build_checkpoint(model.with_name("synced"), 64)
            print(f"{'seconds':<14}{'this tree':>12}{args.revision[:12]:>14}{'ratio':>8}   95 % interval", flush=True)
            lost = [section for section in args.only if not compare(section, own, other, model, args.pairs)]
        finally:
            for tree in (own, other):
                git("worktree", "remove", "--force", str(tree), check=False)
    if lost:
        sys.exit(f"the upper end is {LIMIT} or more: {', '.join(lost)}")


if __name__ == "__main__":
    main()
