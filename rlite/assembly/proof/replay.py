"""A recorded step made again: `rlite replay RUN --step N`.

    rlite replay runs/grpo --step 12                           compare the step with what the run has kept
    rlite replay runs/grpo --step 12 --group 3 --pdb           stop in the loss of one group
    rlite replay runs/grpo --step 12 --bundle step.zip --with-data --with-weights
    rlite replay step.zip                                      the same, on another machine

The steps after the newest checkpoint before it are made again from the record, without generation and rewards.
"""

from __future__ import annotations

import json
import pdb
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite import config, files
from rlite.algorithms import OnLogprobs
from rlite.assembly.launch import session_of
from rlite.assembly.proof.bundle import open_source, write_bundle
from rlite.assembly.proof.comparison import Comparison, compare, compare_checkpoints, compare_metrics
from rlite.assembly.proof.options import ReplayConfig
from rlite.assembly.proof.source import Source, columns_of
from rlite.assembly.proof.trainers import RecordedSteps
from rlite.data.packs import sequence_lengths, split_batch
from rlite.engine.train import RliteTrainEngine
from rlite.errors import ConfigError, DataError, writing
from rlite.services.console.terminal import ConsoleReporter
from rlite.trainer.rl.objective import OwnLogprobs


@dataclass
class ReplayedStep:
    """The result of one step."""

    step: int
    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """Return the worst verdict."""
        if all(each.is_equal for each in self.comparisons):
            return "equal"
        return "within bounds" if all(each.is_near for each in self.comparisons) else "differs"


@dataclass
class Replay:
    """The result of a replay."""

    start: str
    """checkpoint or model that it began from"""
    steps: list[ReplayedStep] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """texts about everything that was not compared, with the reason"""

    @property
    def has_differences(self) -> bool:
        """True if a step differs beyond the bounds."""
        return any(step.verdict == "differs" for step in self.steps)

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values."""
        steps = [{**asdict(step), "verdict": step.verdict} for step in self.steps]
        return {"start": self.start, "steps": steps, "notes": self.notes}


def main(argv: Sequence[str]) -> None:
    """Replay a step, and show how it compares; the process fails if it differs.

    Raises:
        DataError: the step differs from what the run has kept.
    """
    options = config.load(ReplayConfig, ReplayConfig.arguments(list(argv)))
    console = ConsoleReporter()
    with open_source(options) as source:
        step = options.step or source.last_step
        if options.bundle is not None:
            path = Path(options.bundle).expanduser()
            console.report(f"bundle of step {step}", write_bundle(source, step, path, options))
            return
        with replaying(source, step, options) as (trainer, result):
            if options.group is not None or options.microbatch is not None:
                show_rows(source, trainer, step, options, console)
                return
            replay(source, trainer, step, result, options)
    show(result, console)
    if options.result is not None:
        path = Path(options.result).expanduser()
        with writing(path):
            files.replace(path, json.dumps(result.as_json(), indent=2).encode())
    if result.has_differences:
        raise DataError(f"{options.run}: step {step} differs from what the run has kept")


@contextmanager
def replaying(source: Source, step: int, options: ReplayConfig) -> Iterator[tuple[RecordedSteps, Replay]]:
    """Hold the trainer of a run at the checkpoint before a step.

    Args:
        source: the run.
        step: the step.
        options: options of the command.

    Yields:
        The trainer, and the result to be filled.

    Raises:
        ConfigError: the run has fewer steps, or its options were changed since.
    """
    is_own = options.layout == "own"
    with tempfile.TemporaryDirectory(prefix="rlite-replay-") as scratch:
        own = source.run.options(Path(scratch) / "run", options.code, is_own)
        with session_of(own):
            first, total = source.first_step(step), source.total_steps(own)
            if step > total:
                raise ConfigError(f"step {step}: the run has {total} steps")
            source.check_options(step)
            trainer = RecordedSteps(source.run, own, total, source.batch(first, own))
            trainer.begin()
            checkpoint = source.checkpoint_before(step)
            if checkpoint is None:
                start = f"the model before step 1: there is no checkpoint before step {step}"
            else:
                start = f"{checkpoint}, after step {trainer.load(checkpoint)}"
            if options.pdb:
                stop_in_loss(trainer.trainer)
            yield trainer, Replay(start, notes=list(source.notes))


def replay(source: Source, trainer: RecordedSteps, last: int, result: Replay, options: ReplayConfig) -> None:
    """Make the steps up to `last` again, and compare each with what the run has kept.

    Args:
        source: the run.
        trainer: its trainer, before the first of the steps.
        last: the last step.
        result: takes the comparisons.
        options: options of the command.
    """
    is_own = options.layout == "own" or source.is_one_device
    for step in range(trainer.trainer.run.step + 1, last + 1):
        batch = source.batch(step, trainer.options)
        learnt, metrics = trainer.step(batch)
        found = ReplayedStep(step, _compare_columns(source, step, learnt))
        logged = source.metrics(step)
        if logged is None:
            result.notes.append(f"step {step}: metrics.jsonl has no line of it, so its metrics are not compared")
        else:
            found.comparisons += compare_metrics(logged, metrics, is_own, source.is_complete(step))
        found.comparisons += _compare_weights(source, trainer, step)
        result.steps.append(found)
    if not source.has_checkpoint(last):
        result.notes.append(f"there is no checkpoint after step {last}, so its weights are not compared")


def _compare_columns(source: Source, step: int, learnt: TensorDict) -> list[Comparison]:
    """Return how what a step has computed for its tokens compares, where it is recorded."""
    found, kept = [], source.made(step)
    again: dict[str, Tensor] = {key: learnt[key] for key in map(str, learnt.keys()) if key in kept}
    for key, name in (("old_logprobs", "trainer_logprobs"), ("trained_logprobs", "trainer_logprobs")):
        if key in learnt and name in kept:
            again.setdefault(name, learnt[key])
    if "entropies" in learnt and "entropy" in kept:
        again["entropy"] = learnt["entropies"]
    places = [f"row {row}" for row in range(len(learnt))]
    for name, value in again.items():
        known = kept[name]
        is_known = ~known.isnan() if known.is_floating_point() else torch.ones_like(known, dtype=torch.bool)
        found.append(
            compare(
                f"{name} of tokens" if known.dim() > 1 else f"{name} of rows",
                known,
                torch.where(is_known, value.to(known.dtype), known),
                places,
            )
        )
    return found


def _compare_weights(source: Source, trainer: RecordedSteps, step: int) -> list[Comparison]:
    """Return how the weights and the optimizer's state after a step compare with the checkpoint, if there is one."""
    found = []
    if source.has_checkpoint(step):
        with tempfile.TemporaryDirectory(prefix="rlite-replay-") as scratch:
            for name, engine in trainer.engines.items():
                kept = source.checkpoint(step, name)
                again = engine.save_state(Path(scratch) / (name or "actor"), step=step).result()
                prefix = f"{name}: " if name else ""
                found += [
                    Comparison(**{**asdict(each), "name": f"{prefix}{each.name}"})
                    for each in compare_checkpoints(kept, again)
                ]
    return found


def show(result: Replay, console: ConsoleReporter) -> None:
    """Show how each step compares, and all quantities of the last one."""
    console.report("replay", {"from": result.start})
    for step in result.steps[:-1]:
        odd = [each for each in step.comparisons if not each.is_equal]
        worst = f"; {_worst(odd)}" if odd else ""
        console.note(f"step {step.step}: {step.verdict}{worst}")
        if step.verdict == "differs":
            console.report(f"step {step.step}", {each.name: _told(each) for each in odd}, style="red")
    last = result.steps[-1]
    console.report(f"step {last.step}: {last.verdict}", {each.name: _told(each) for each in last.comparisons})
    if result.notes:
        console.warn("not compared", [("", note) for note in result.notes])


def _worst(odd: Sequence[Comparison]) -> str:
    worst = max(odd, key=lambda each: each.difference if each.difference == each.difference else float("inf"))
    return f"{worst.name} by {worst.difference:.3g}"


def _told(each: Comparison) -> str:
    values = "" if each.kept is None else f"{each.kept:.9g} kept, {each.again:.9g} now; "
    count = f"{each.count:,} numbers; " if each.kept is None else ""
    away = "" if each.is_equal else f", by at most {each.difference:.3g} at {each.where}"
    return f"{values}{count}{each.verdict}{away}"


def stop_in_loss(trainer: Any) -> None:
    """Let the debugger stop wherever the loss of a trainer is computed."""
    loss = trainer.loss
    own = {"__call__": _stopping(type(loss).__call__)}
    stopping: Any = object.__new__(type(f"Stopping{type(loss).__name__}", (type(loss),), own))
    vars(stopping).update(vars(loss))
    trainer.loss = stopping


def _stopping(call: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, outputs: Any, data: Mapping[str, Any]) -> Any:
        pdb.set_trace()  # `data` holds the pack, `outputs` what the model says about it; `step` enters the loss
        return call(self, outputs, data)

    return __call__


def show_rows(
    source: Source, trainer: RecordedSteps, step: int, options: ReplayConfig, console: ConsoleReporter
) -> None:
    """Show the loss of some rows of a step, and their tokens, before the update of the step.

    Args:
        source: the run.
        trainer: its trainer, before the first of the steps.
        step: the step.
        options: name the rows.
        console: shows them.

    Raises:
        ConfigError: the step has no such rows.
    """
    for earlier in range(trainer.trainer.run.step + 1, step):
        trainer.step(source.batch(earlier, trainer.options))
    engine = trainer.engines[""]
    batch = trainer.before_update(source.batch(step, trainer.options))
    loss = trainer.trainer.loss
    if options.group is not None:
        key = next((name for name in ("group_ids", "pair_ids") if name in batch), None)
        numbers = batch[key] if key else torch.arange(len(batch))
        rows = (numbers == options.group).nonzero()[:, 0]
        what, known = f"group {options.group}", sorted(set(numbers.tolist()))
    else:
        microbatches = _microbatches(engine, batch)
        known = list(range(len(microbatches)))
        number = options.microbatch or 0
        rows = torch.tensor(microbatches[number] if number in known else [], dtype=torch.int64)
        what = f"microbatch {number}"
    if not len(rows):
        raise ConfigError(f"step {step} has no {what}; it has {', '.join(map(str, known[:20]))}")
    part = batch[rows]
    stats = engine.eval_batch(part, loss, loss.weight)
    console.report(f"step {step}, {what}: before the update", {name: f"{value:.6g}" for name, value in stats.items()})
    if not isinstance(loss, OnLogprobs):  # scores of whole rows
        return
    logprobs = engine.forward(part, OwnLogprobs(temperature=loss.temperature))
    for number, length in enumerate(sequence_lengths(part)):
        lines = [_token(part, logprobs, number, place) for place in range(length) if part["loss_mask"][number, place]]
        console.report(f"row {int(rows[number])}: token, log-probability, engine's, advantage", lines)


def _microbatches(engine: RliteTrainEngine, batch: TensorDict) -> list[list[int]]:
    """Return the rows of each microbatch in which an engine computes a batch."""
    capacity = engine.options.max_tokens_per_microbatch * engine.dims.pack_factor
    how: Any = {"method": engine.options.packing_method, "may_share": lambda: engine.prefix_obstacle() is None}
    shares = split_batch("replay", columns_of(batch), engine.num_data_ranks, capacity, **how)
    return [[share.rows[row] for row in rows] for share in shares for rows in share.microbatches]


def _token(batch: TensorDict, logprobs: Tensor, row: int, place: int) -> tuple[str, str]:
    values = [logprobs[row, place].item()]
    values += [batch[key][row, place].item() for key in ("logprobs", "advantages") if key in batch]
    return f"{place}", f"{int(batch['input_ids'][row, place])}  " + "  ".join(f"{value:.6g}" for value in values)
