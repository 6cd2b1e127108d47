"""A recorded step made again: `rlite replay RUN --step N`.

    rlite replay runs/grpo --step 12                           compare the step with what the run has kept
    rlite replay runs/grpo --step 12 --group 3 --pdb           stop in the loss of one group
    rlite replay runs/grpo --step 12 --bundle step.zip --with-data --with-weights
    rlite replay step.zip                                      the same, on another machine

The steps after the newest checkpoint before it are made again from the record, without generation and rewards.
"""

from __future__ import annotations

import pdb
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite import config
from rlite.algorithms import OnLogprobs
from rlite.assembly.launch import session_of
from rlite.assembly.proof.bundle import open_source, write_bundle
from rlite.assembly.proof.comparison import Comparison, compare_checkpoints, compare_metrics, compare_rows, worst_of
from rlite.assembly.proof.options import ReplayConfig
from rlite.assembly.proof.report import Report
from rlite.assembly.proof.source import Source
from rlite.assembly.proof.trainers import RecordedSteps, beside
from rlite.data.packs import sequence_lengths
from rlite.errors import ConfigError, DataError, shortened
from rlite.services.console.terminal import ConsoleReporter
from rlite.trainer.rl.objective import OwnLogprobs

MADE_AS = {"trainer_logprobs": ("trainer_logprobs", "old_logprobs", "trained_logprobs"), "entropy": ("entropies",)}
"""keys of a batch that hold recorded columns of tokens, unless they have the column's name"""
COLUMNS = {"engine's": "logprobs", "advantage": "advantages"}
"""columns of shown tokens besides the log-probability, and their keys of a batch"""
MAX_TEXT, WIDTH = 2_000, 12
"""most characters that are shown of a part of a row, and least of a token"""


def main(argv: Sequence[str]) -> None:
    """Replay a step, and show how it compares; the process fails if it differs."""
    options = config.load(ReplayConfig, ReplayConfig.arguments(list(argv)))
    console, report = ConsoleReporter(), Report()
    with open_source(options) as source:
        step = options.step or source.last_step
        if options.bundle is not None:
            path = Path(options.bundle).expanduser()
            console.report(f"bundle of step {step}", write_bundle(source, step, path, options))
            return
        with replaying(source, step, options, report) as trainer:
            if options.group is not None or options.microbatch is not None:
                show_rows(source, trainer, step, options, console)
                return
            replay(source, trainer, step, options, report)
    show(report, console)
    if options.result is not None:
        report.write(Path(options.result).expanduser())
    if report.found:
        raise DataError(f"{options.run}: step {step} differs from what the run has kept")


@contextmanager
def replaying(source: Source, step: int, options: ReplayConfig, report: Report) -> Iterator[RecordedSteps]:
    """Hold the trainer of a run at the checkpoint before a step.

    If the run went on with other options after this checkpoint, the steps up to there are made first.
    """
    checkpoint = source.checkpoint_before(step)
    no_checkpoint = f"the model before step 1: there is no checkpoint before step {step}"
    found = no_checkpoint if checkpoint is None else f"{checkpoint}, after step {source.first_step(step) - 1}"
    report.start = source.told(found)
    for note in source.notes:
        report.note(source.told(note))
    with tempfile.TemporaryDirectory(prefix="rlite-replay-") as scratch:
        for first, last in source.spans(step):
            run = source.run_at(first)
            own = run.options(Path(scratch) / "run", options.code, options.layout == "own")
            with session_of(own):
                total = source.total_steps(own, last)
                trainer = RecordedSteps(run, own, total, source.batch(first, own), source.metrics)
                trainer.begin()
                if checkpoint is not None:
                    trainer.load(checkpoint)
                if options.pdb:
                    stop_in_loss(trainer.trainer)
                if last == step:
                    yield trainer
                else:
                    replay(source, trainer, last, options, report)
                    checkpoint = Path(scratch) / f"step-{last}"
                    trainer.save(checkpoint)


def replay(source: Source, trainer: RecordedSteps, last: int, options: ReplayConfig, report: Report) -> None:
    """Make the steps up to `last` again, and compare each with what the run has kept."""
    is_own = options.layout == "own" or trainer.run.is_one_device
    for step in range(trainer.trainer.run.step + 1, last + 1):
        learnt, metrics = trainer.step(source.batch(step, trainer.options))
        report.replayed(step, f"record, step {step}", _compare_columns(source.made(step), learnt))
        if (logged := source.metrics.get(step)) is None:
            report.note(f"step {step}: metrics.jsonl has no line of it, so its metrics are not compared")
        else:
            compared = compare_metrics(logged, metrics, is_own, source.is_complete(step), report.is_exact)
            report.replayed(step, f"metrics.jsonl, step {step}", compared)
        if source.checkpoint(step) is not None:
            report.replayed(step, f"state/step-{step}", _compare_weights(source, trainer, step))
    for name, problem in source.reader.problems.items():
        report.note(f"record/{name} {problem}")
    if source.checkpoint(last) is None:
        report.note(f"there is no checkpoint after step {last}, so its weights are not compared")


def _compare_columns(kept: Mapping[str, Tensor], learnt: TensorDict) -> Iterator[Comparison]:
    """Yield how what a step has computed for its tokens compares, where it is recorded."""
    for name, known in kept.items():
        if key := next((key for key in MADE_AS.get(name, (name,)) if key in learnt), None):
            yield compare_rows(name, known, learnt[key])


def _compare_weights(source: Source, trainer: RecordedSteps, step: int) -> Iterator[Comparison]:
    """Yield how the weights and the optimizer's state of each engine compare with the checkpoint after a step."""
    with tempfile.TemporaryDirectory(prefix="rlite-replay-") as scratch:
        again = Path(scratch) / f"step-{step}"
        trainer.save(again)
        for name in trainer.engines:
            if (kept := source.checkpoint(step, name)) is not None:
                yield from compare_checkpoints(kept, beside(again, name), f"{name}: " if name else "")


def show(report: Report, console: ConsoleReporter) -> None:
    """Show how each step compares: all quantities of the last one and of those that differ."""
    console.report("replay", {"from": report.start})
    for step, compared in report.steps.items():
        worst = worst_of(compared)
        if step == max(report.steps) or worst.verdict == "differs":
            style = "red" if worst.verdict == "differs" else ""
            console.report(f"step {step}: {worst.verdict}", {each.name: str(each) for each in compared}, style=style)
        else:
            console.note(f"step {step}: {worst.verdict}{'' if worst.is_equal else f'; {worst.name}: {worst}'}")
    if report.notes:
        console.warn("not compared", [("", note) for note in report.notes])


def stop_in_loss(trainer: Any) -> None:
    """Let the debugger stop wherever the loss of a trainer is computed."""
    loss, call = trainer.loss, type(trainer.loss).__call__

    def __call__(self: Any, outputs: Any, data: Mapping[str, Any]) -> Any:
        pdb.set_trace()  # `data` holds the pack, `outputs` what the model says about it; `step` enters the loss
        return call(self, outputs, data)

    stopping = type(f"Stopping{type(loss).__name__}", (type(loss),), {"__call__": __call__})
    object.__setattr__(loss, "__class__", stopping)  # losses may be frozen


def show_rows(
    source: Source, trainer: RecordedSteps, step: int, options: ReplayConfig, console: ConsoleReporter
) -> None:
    """Show the loss of some rows of a step, their texts and their tokens, before the update of the step."""
    for earlier in range(trainer.trainer.run.step + 1, step):
        trainer.step(source.batch(earlier, trainer.options))
    engine = trainer.engines[""]
    batch = trainer.trainer.prepare(source.batch(step, trainer.options))
    loss = trainer.trainer.loss
    if options.group is not None:
        key = next((name for name in ("group_ids", "pair_ids") if name in batch), None)
        numbers = batch[key] if key else torch.arange(len(batch))
        rows = (numbers == options.group).nonzero()[:, 0]
        what, known = f"group {options.group}", sorted(set(numbers.tolist()))
    else:
        shares = engine.shares("replay", batch, loss)
        microbatches = [[share.rows[row] for row in rows] for share in shares for rows in share.microbatches]
        known = list(range(len(microbatches)))
        number = options.microbatch or 0
        rows = torch.tensor(microbatches[number] if number in known else [], dtype=torch.int64)
        what = f"microbatch {number}"
    if not len(rows):
        raise ConfigError(f"step {step} has no {what}; it has {', '.join(map(str, known[:20]))}")
    part = batch[rows]
    stats = engine.eval_batch(part, loss, loss.weight)
    shown = {name: f"{value:.6g}" for name, value in stats.items() if not isinstance(value, Tensor)}
    console.report(f"step {step}, {what}: before the update", shown)
    if not isinstance(loss, OnLogprobs):  # scores of whole rows
        return
    logprobs = engine.forward(part, OwnLogprobs(temperature=loss.temperature))
    texts = source.texts(lambda why: console.warn("tokens are shown without texts", {"reason": why}))
    columns = ", ".join(["token", "text", "log-probability", *(name for name, key in COLUMNS.items() if key in part)])
    for number, length in enumerate(sequence_lengths(part)):
        ids, mask = part["input_ids"][number, :length].tolist(), part["loss_mask"][number].tolist()
        pieces = [""] * length if texts is None else texts.pieces(ids)
        title = f"row {int(rows[number])}: {sum(map(bool, mask))} of {length} tokens are learnt"
        console.report(title, [] if texts is None else _parts(pieces, mask))
        lines = [_token(part, logprobs, number, place, pieces[place]) for place in range(length) if mask[place]]
        console.report(f"row {int(rows[number])}: {columns}", lines)


def _parts(pieces: Sequence[str], mask: Sequence[bool]) -> list[tuple[str, str]]:
    """Return the text of a row in parts that are learnt, or only read."""
    parts = groupby(zip(mask, pieces, strict=False), lambda pair: bool(pair[0]))
    joined = [(is_learnt, "".join(text for _, text in own)) for is_learnt, own in parts]
    return [("learnt" if is_learnt else "read", shortened(text, MAX_TEXT)) for is_learnt, text in joined]


def _token(batch: TensorDict, logprobs: Tensor, row: int, place: int, text: str) -> tuple[str, str]:
    values = [logprobs[row, place].item(), *(batch[key][row, place].item() for key in COLUMNS.values() if key in batch)]
    token = f"{int(batch['input_ids'][row, place])}  {text!r:<{WIDTH}}"
    return f"{place}", "  ".join([token, *(f"{value:.6g}" for value in values)])
