"""Share of a GRPO step that recording its rollouts takes.

    .venv/bin/python -m benchmarks.recording [--steps 30] [--threads 1]

The steps are those of `benchmarks.grpo`: 8 prompts x 8 generations of up to 128 tokens. In one run, `all`, `sample` and
`none` alternate from step to step. A step ends when its record is on disk, although a run goes on meanwhile. `recording`
is the time from the end of the step to the end of the writing; its share is of the steps without a record. `sample`
writes the texts and tokens of all groups in every tenth of its steps, as in a run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch

import rlite
from benchmarks.grpo import STOP_PROBABILITY, grpo_trainer
from benchmarks.model import build_model
from rlite.observability.record.files import FOLDER
from rlite.rollout.record.recorder import Amount, Recorder, make_recorder
from rlite.trainer.rl.record import decided

MODES: tuple[Amount, ...] = ("all", "sample", "none")
WARM_UP = 2
LIMIT = 0.02
"""share of a step that `sample` may take"""


def seconds_of_steps(model: Path, scratch: Path, steps: int) -> dict[str, list[tuple[float, float, float]]]:
    """Return seconds of each step without its recording, seconds of the recording, and CPU seconds of both, by mode."""
    trainer = grpo_trainer(model, scratch, steps + WARM_UP, record="all")
    trainer.start()
    tokenizer, collector = trainer.engines.rollout.tokenizer, trainer.engines.rollout.collector
    recorders: dict[Amount, Recorder] = {
        mode: make_recorder(scratch / mode, tokenizer, mode, limit=2**32) for mode in MODES
    }
    found = defaultdict(list)
    for number, mode in zip(range(steps + WARM_UP), itertools.cycle(MODES), strict=False):
        cpu_started, started = time.process_time(), time.perf_counter()
        batch = trainer.with_advantages(trainer.rollouts.next_batch())
        trainer.update(batch)
        trainer.sync()
        trained = time.perf_counter()
        ended, groups = collector.take_ended(), set(batch["group_ids"].tolist())
        recorders[mode].record(len(found[mode]) + 1, [decided(group, groups) for group in ended], batch)
        recorders[mode].flush()
        written, cpu = time.perf_counter(), time.process_time() - cpu_started
        trainer.run.step += 1
        if number >= WARM_UP:
            found[mode].append((trained - started, written - trained, cpu))
    for recorder in recorders.values():
        recorder.close()
    return found


def main() -> None:
    """Print the seconds of each mode, and the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = build_model(scratch / "model", stop_probability=STOP_PROBABILITY)
        rlite.init(num_devices=1, num_threads=args.threads)
        found = seconds_of_steps(model, scratch / "run", args.steps)
        rlite.shutdown()
        sizes = {
            mode: sum(path.stat().st_size for path in (scratch / "run" / mode / FOLDER).glob("*")) for mode in MODES
        }
    plain = statistics.mean(step for step, _, _ in found["none"])
    plain_cpu = statistics.median(cpu for _, _, cpu in found["none"])
    shares = {}
    for mode in MODES:
        recording = [seconds for _, seconds, _ in found[mode]]
        shares[mode] = statistics.mean(recording) / plain
        cpu = statistics.median(cpu for _, _, cpu in found[mode])
        step = statistics.median(step + seconds for step, seconds, _ in found[mode])
        print(
            f"{mode:6} {len(recording)} steps: {step:.3f} s a step (median), recording {statistics.mean(recording):.4f} s "
            f"(mean) = {shares[mode]:.2%}, CPU {cpu:.3f} s ({cpu / plain_cpu - 1:+.2%}), "
            f"{sizes[mode] / len(recording) / 1024:.0f} KiB a step"
        )
    print(f"torch {torch.__version__}, {args.threads} thread(s); limit {LIMIT:.0%} for sample: ", end="")
    print("reached" if shares["sample"] < LIMIT else "missed")


if __name__ == "__main__":
    main()
