"""Cost of the chain of hashes, as a share of the steps between two saves. The exit status is 1 above the limit.

    .venv/bin/python -m benchmarks.chain [--steps 20] [--threads 1]

The steps are those of `benchmarks.grpo`: 8 prompts x 8 generations of up to 128 tokens, with `trainer.record=all` and a
save after every step, by which weights and optimizer are written. The cost is the median time of a link, which hashes
the new files of the record, the exported weights, the manifest of the checkpoint before and the new lines of metrics.
A run that saves every N steps pays it once in N steps, with N times as many files of the record.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import rlite
from benchmarks.grpo import STOP_PROBABILITY, grpo_trainer
from benchmarks.model import build_model
from rlite.assembly.proof.chained import HashChain

EVERY = 20
"""steps between two saves, by default"""
LIMIT = 0.01


def measured(model: Path, scratch: Path, num_steps: int) -> tuple[list[float], list[float]]:
    """Return the seconds of steps, and of the links after them."""
    trainer = grpo_trainer(model, scratch, num_steps + 1, record="all")
    trainer.start()
    run = trainer.run
    chain = next(each for each in run.observers if isinstance(each, HashChain))
    steps, links = [], []
    for _ in range(num_steps):
        began = time.perf_counter()
        trainer.finish_step(trainer.learn(trainer.rollouts.next_batch()))
        steps.append(time.perf_counter() - began)
        for each in run.observers:
            each.before_save(run)
        run.saved.write_models()
        run.saved.write_state(run.step, {}, None)
        run.saved.checkpoints.finish()
        began = time.perf_counter()
        chain.on_save(run, {})
        links.append(time.perf_counter() - began)
    return steps[2:], links[2:]


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as scratch:
        model = build_model(Path(scratch) / "model", stop_probability=STOP_PROBABILITY)
        rlite.init(num_devices=1, num_threads=given.threads)
        steps, links = measured(model, Path(scratch) / "run", given.steps)
        rlite.shutdown()
    step, link = statistics.median(steps), statistics.median(links)
    print(f"{given.steps} steps, {given.threads} threads: a step {step:.2f} s, a link {1e3 * link:.1f} ms")
    shares = f"{link / step:.2%} with a save after every step, {link / step / EVERY:.2%} after every {EVERY}"
    print(f"share of the steps: {shares}")
    raise SystemExit(link / step > LIMIT)


if __name__ == "__main__":
    main()
