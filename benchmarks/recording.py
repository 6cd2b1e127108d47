"""Share of a GRPO step that recording its rollouts takes. The exit status is 1 if `sample` takes more than its limit.

    .venv/bin/python -m benchmarks.recording [--steps 60] [--threads 1] [--num-devices 2]

The steps are those of `benchmarks.grpo`: 8 prompts x 8 generations of up to 128 tokens. In each round one trainer makes
a step with `all`, one with `sample` and one with `none`, in changing order, with the same prompts and seeds. A step is
whole: the collector keeps the rollouts and their tokens, the loss returns the log-probabilities and entropies, and the
step waits until its record is on disk, although a run goes on meanwhile. The share is the median over the rounds of the
paired ratio to `none`, less 1. `sample` writes the texts and tokens of all groups in every tenth step: its share is the
mean of both kinds of steps, weighted by their number. A busy machine disturbs CPU time less than wall time. With more
devices than one the workers are processes of Ray, and CPU time is that of this process alone.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import rlite
from benchmarks.grpo import STOP_PROBABILITY, grpo_trainer
from benchmarks.model import build_model
from rlite.assembly.observers import RunRecord
from rlite.assembly.rl import PartsMaker
from rlite.data.rows import prompt_stream
from rlite.rollout import RolloutCollector
from rlite.services.record.files import used_bytes
from rlite.services.record.recorder import WHOLE_EVERY, Amount
from rlite.trainer.ppo import PpoTrainer

MODES: tuple[Amount, ...] = ("all", "sample", "none")
WARM_UP = 2
LIMIT = 0.02
"""share of a step that `sample` may take"""


@dataclass(frozen=True)
class Step:
    """Seconds of one step."""

    number: int
    wall: float
    cpu: float


class Recorded:
    """A trainer whose rollouts are recorded in one amount.

    Args:
        trainer: shared with the other amounts.
        mode: the amount.
        folder: takes the record.
    """

    def __init__(self, trainer: PpoTrainer, mode: Amount, folder: Path) -> None:
        own = {"trainer": trainer.options.trainer.model_copy(update={"record": mode})}
        options, engine = trainer.options.model_copy(update=own), trainer.engines.rollout
        self._trainer, self._loss = trainer, replace(trainer.loss, returns_tokens=mode != "none")
        self.collector = RolloutCollector(engine, options.collector_options().model_copy(update={"seed": 0}))
        engines: Any = SimpleNamespace(
            rollout=SimpleNamespace(
                collector=self.collector, tokenizer=engine.tokenizer, set_version=engine.set_version
            )
        )
        self._run: Any = SimpleNamespace(folder=folder, step=0, is_interrupted=False, console=trainer.run.console)
        prompts = prompt_stream(trainer.data, options.train_data.prompts_per_rollout, seed=0)
        self._rollouts = PartsMaker(options).rollouts(engines, trainer.workflow, prompts)
        self.record = RunRecord(options.trainer, self._run, engines.rollout, options.has_dynamic_filtering)
        self.record.begin()

    def end(self) -> None:
        """End the record and the collector."""
        self.record.close(self._run, None)
        self.collector.close()

    def step(self, number: int) -> Step:
        """Return the seconds of a step, which is on disk at its end."""
        trainer, self._run.step = self._trainer, number
        trainer.engines.rollout.set_version(number)  # of all amounts: seeds depend on it
        trainer.loss = self._loss
        began = time.perf_counter(), time.process_time()
        batch = trainer.update(trainer.with_advantages(self._rollouts.next_batch()))
        trainer.sync()
        self.record.step(batch)
        self.record.before_save(self._run)
        return Step(number, time.perf_counter() - began[0], time.process_time() - began[1])


def measured(model: Path, scratch: Path, num_rounds: int) -> dict[Amount, list[Step]]:
    """Return the steps of each amount."""
    trainer = grpo_trainer(model, scratch, total_steps=num_rounds, record="none")
    trainer.start()
    amounts = {mode: Recorded(trainer, mode, scratch / mode) for mode in MODES}
    found: dict[Amount, list[Step]] = {mode: [] for mode in MODES}
    for number in range(1, WARM_UP + num_rounds + 1):
        turn = number % len(MODES)
        for mode in (*MODES[turn:], *MODES[:turn]):
            step = amounts[mode].step(number)
            if number > WARM_UP:
                found[mode].append(step)
    for amount in amounts.values():
        amount.end()
    return found


def ratios(steps: Iterable[Step], plain: Iterable[Step], clock: str) -> dict[int, float]:
    """Return by step the ratio of its seconds to those of the same step without a record, less 1."""
    pairs = zip(steps, plain, strict=True)
    return {one.number: vars(one)[clock] / vars(other)[clock] - 1 for one, other in pairs}


def share_of(mode: Amount, found: Mapping[int, float]) -> float:
    """Return the share of a step that recording takes, from the ratios of many steps."""
    if mode != "sample":
        return statistics.median(found.values())
    whole = statistics.median(ratio for number, ratio in found.items() if number % WHOLE_EVERY == 1)
    other = statistics.median(ratio for number, ratio in found.items() if number % WHOLE_EVERY != 1)
    return (whole + (WHOLE_EVERY - 1) * other) / WHOLE_EVERY


def error_of(found: Mapping[int, float]) -> float:
    """Return the standard error of the median of ratios, from their quartiles as if they were normal."""
    low, _, high = statistics.quantiles(found.values(), n=4)
    return 0.93 * (high - low) / math.sqrt(len(found))


def shares_of(mode: Amount, found: Mapping[Amount, Sequence[Step]]) -> dict[str, float]:
    """Return the share that an amount takes, by clock."""
    return {clock: share_of(mode, ratios(found[mode], found["none"], clock)) for clock in ("wall", "cpu")}


def main() -> None:
    """Print the seconds and the share of each amount."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help=f"of each amount; at least {WHOLE_EVERY}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--num-devices", type=int, default=1)
    args = parser.parse_args()
    if args.steps < WHOLE_EVERY:
        parser.error(f"--steps {args.steps}: expected at least {WHOLE_EVERY}")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = build_model(scratch / "model", stop_probability=STOP_PROBABILITY)
        rlite.init(num_devices=args.num_devices, num_threads=args.threads)
        found = measured(model, scratch / "run", args.steps)
        rlite.shutdown()
        sizes = {mode: used_bytes(scratch / "run" / mode) / (args.steps + WARM_UP) for mode in MODES}
    for mode in MODES:
        seconds = {clock: statistics.median(vars(step)[clock] for step in found[mode]) for clock in ("wall", "cpu")}
        errors = {clock: error_of(ratios(found[mode], found["none"], clock)) for clock in ("wall", "cpu")}
        shares = "".join(
            f", {share:+.2%} (error {errors[clock]:.2%}) of {clock}" for clock, share in shares_of(mode, found).items()
        )
        print(
            f"{mode:6} {len(found[mode])} steps of {seconds['wall']:.3f} s, CPU {seconds['cpu']:.3f} s{shares}; "
            f"{sizes[mode] / 1024:.0f} KiB a step"
        )
    is_reached = shares_of("sample", found)["wall"] < LIMIT
    told = "reached" if is_reached else "missed"
    print(f"torch {torch.__version__}, {args.threads} thread(s); limit {LIMIT:.0%} for sample: {told}")
    if not is_reached:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
