"""Share of a GRPO step that recording its rollouts takes. The exit status is 1 if `sample` takes more than its limit.

    .venv/bin/python -m benchmarks.recording [--steps 30] [--threads 1] [--num-devices 2]

The steps are those of `benchmarks.grpo`: 8 prompts x 8 generations of up to 128 tokens. In one run, `all`, `sample` and
`none` alternate from step to step. Each step waits until its record is on disk, although a run goes on meanwhile: the
share of the time is an upper bound. A busy machine disturbs the share of CPU time less. `sample`
writes the texts and tokens of all groups in every tenth of its steps, as in a run. With several devices the workers are
processes of Ray, which send the log-probabilities and entropies of the tokens to this process: the steps of `all` and
`sample` then take longer than those of `none`, and CPU time is that of this process alone.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import rlite
from benchmarks.grpo import STOP_PROBABILITY, grpo_trainer
from benchmarks.model import build_model
from rlite.observability.record.files import FOLDER
from rlite.rollout.record.recorder import Amount, Recorder, make_recorder
from rlite.trainer.rl.record import Outcome

MODES: tuple[Amount, ...] = ("all", "sample", "none")
WARM_UP = 2
LIMIT = 0.02
"""share of a step that `sample` may take"""


@dataclass(frozen=True)
class Seconds:
    """Seconds of one step, by the clock or of CPU time."""

    step: float
    recording: float


def seconds_of_steps(model: Path, scratch: Path, steps: int) -> dict[str, list[tuple[Seconds, Seconds]]]:
    """Return the seconds of each step by mode, by the clock and of CPU time."""
    trainer = grpo_trainer(model, scratch, steps + WARM_UP, record="all")
    trainer.start()
    tokenizer, collector = trainer.engines.rollout.tokenizer, trainer.engines.rollout.collector
    recorders: dict[Amount, Recorder] = {
        mode: make_recorder(scratch / mode, tokenizer, mode, limit=2**32) for mode in MODES
    }
    found = defaultdict(list)
    for number, mode in zip(range(steps + WARM_UP), itertools.cycle(MODES), strict=False):
        began = time.perf_counter(), time.process_time()
        batch = trainer.with_advantages(trainer.rollouts.next_batch())
        trainer.loss = replace(trainer.loss, returns_tokens=mode != "none")
        trainer.update(batch)
        trainer.sync()
        trained = time.perf_counter(), time.process_time()
        ended, groups = collector.take_ended(), set(batch["group_ids"].tolist())
        recorders[mode].record(len(found[mode]) + 1, [Outcome(trained=groups).decide(group) for group in ended], batch)
        recorders[mode].flush()
        written = time.perf_counter(), time.process_time()
        trainer.run.step += 1
        if number >= WARM_UP:
            wall, cpu = (Seconds(b - a, c - b) for a, b, c in zip(began, trained, written, strict=True))
            found[mode].append((wall, cpu))
    for recorder in recorders.values():
        recorder.close()
    return found


def main() -> None:
    """Print the seconds of each mode, and the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--num-devices", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = build_model(scratch / "model", stop_probability=STOP_PROBABILITY)
        rlite.init(num_devices=args.num_devices, num_threads=args.threads)
        found = seconds_of_steps(model, scratch / "run", args.steps)
        rlite.shutdown()
        sizes = {
            mode: sum(path.stat().st_size for path in (scratch / "run" / mode / FOLDER).glob("*")) for mode in MODES
        }
    plain = [statistics.mean(sides[clock].step for sides in found["none"]) for clock in range(2)]
    shares = {}
    for mode, steps in found.items():
        recording = [statistics.mean(sides[clock].recording for sides in steps) for clock in range(2)]
        shares[mode] = recording[0] / plain[0]
        step = statistics.mean(wall.step for wall, _ in steps)
        print(
            f"{mode:6} {len(steps)} steps of {step:.3f} s: recording {recording[0]:.4f} s of {plain[0]:.2f} s "
            f"= {shares[mode]:.2%}, CPU {recording[1]:.4f} s of {plain[1]:.2f} s = {recording[1] / plain[1]:.2%}, "
            f"{sizes[mode] / len(steps) / 1024:.0f} KiB a step"
        )
    is_reached = shares["sample"] < LIMIT
    told = "reached" if is_reached else "missed"
    print(f"torch {torch.__version__}, {args.threads} thread(s); limit {LIMIT:.0%} for sample: {told}")
    if not is_reached:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
