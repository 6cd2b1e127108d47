"""The table of an evaluation.

Progress of an evaluation on the standard error: on a terminal a line that changes, in a file a line every 10 s.

The record of an evaluation that is under way, for readers of its folder.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from rlite.assembly.evaluate.options import default_temperature
from rlite.errors import RliteError
from rlite.evaluation.folder import Candidate, EvaluatedModel, EvaluationResult
from rlite.evaluation.metrics import selection_of, standard_error_of
from rlite.evaluation.record import write_record
from rlite.rollout.collector.lost_groups import in_a_line
from rlite.services.console.terminal import ConsoleReporter
from rlite.wording import counted

COUNTS = ("num_", "errors/", "failed_attempts/", "redrawn/")
"""beginnings of the names of metrics that count"""
BESIDE = ("standard_error", "_stderr", "_low", "_high")
"""endings of metrics that stand beside another one in the table"""
_PASS_AT_K = re.compile(r"((?:.*/)?)pass@(\d+)")


def print_result(result: EvaluationResult) -> None:
    """Print metrics and comparison."""
    console = Console(highlight=False, markup=False, emoji=False)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("metric")
    for model in result.models:
        table.add_column(model.name, justify="right")
    lowest = {name for model in result.models for name, is_higher in model.higher_is_better.items() if not is_higher}
    for name in shown_metrics([model.metrics for model in result.models]):
        label = f"{name} (lower is better)" if name in lowest else name
        table.add_row(label, *(shown(name, model.metrics) for model in result.models))
    console.print(title(result), soft_wrap=True)
    console.print(table)
    for model in result.models:
        if reasons := Counter(in_a_line(sample.reason) for sample in model.samples if sample.score is None):
            failed, most = f"{reasons.total()} of {len(model.samples)} samples failed", reasons.most_common(1)[0][0]
            console.print(f"{model.name}: {failed}; most often: {most}", soft_wrap=True)
        for cause, facts in selection_of(model.samples).alarms():
            told = "; ".join(f"{name}: {fact}" for name, fact in facts.items())
            console.print(f"{model.name}: {cause} ({told})", soft_wrap=True)
    if (sentence := difference(result)) is not None:
        console.print(sentence, soft_wrap=True)


def title(result: EvaluationResult) -> str:
    """Return what was measured, in words and numbers: a line, or one for each model if they differ."""
    told = {model.name: questions(model) for model in result.models}
    if len(set(told.values())) == 1:
        return questions(result.models[0])
    return "\n".join(f"{name}: {own}" for name, own in told.items())


def questions(model: EvaluatedModel) -> str:
    """Return what a model was asked, and how its answers were sampled."""
    num_items = len({sample.item for sample in model.samples})
    if tasks := model.settings.get("tasks"):
        asked = f"{num_items} questions of {', '.join(tasks['tasks'])}"
        return f"{asked} x {_sampled(model)}" if any(sample.sample for sample in model.samples) else asked
    at_most = model.settings["sampling"]["max_new_tokens"]
    return f"{counted(num_items, 'prompt')} x {_sampled(model)}, at most {at_most} new tokens"


def _sampled(model: EvaluatedModel) -> str:
    own = model.settings["sampling"]
    num_samples, temperature = own["samples"], own["temperature"]
    default = f" (the default of samples={num_samples})" if temperature == default_temperature(num_samples) else ""
    return f"{counted(num_samples, 'sample')}, temperature {temperature:g}{default}"


def shown_metrics(models: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the metrics for the table, in order: of pass@k, k = 1, 2, 4, ... and the largest."""
    names = list(dict.fromkeys(name for metrics in models for name in metrics))
    ks: dict[str, list[int]] = {}
    for name in names:
        if match := _PASS_AT_K.fullmatch(name):
            ks.setdefault(match[1], []).append(int(match[2]))
    hidden = {f"{task}pass@{k}" for task, own in ks.items() for k in own if k & (k - 1) and k != max(own)}
    return [name for name in names if name not in hidden and not name.endswith(BESIDE)]


def shown(name: str, metrics: Mapping[str, float]) -> str:
    """Return a metric for the table, with its interval or standard error; "" if the model has no such metric."""
    if name not in metrics:
        return ""
    value = metrics[name]
    if name.startswith(COUNTS):
        return f"{value:.0f}"
    if (low := metrics.get(f"{name}_low")) is not None:
        return f"{value:.4f} [{low:.4f}, {metrics[f'{name}_high']:.4f}]"
    error = metrics.get(f"{name}_stderr", metrics.get(standard_error_of(name)))
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def difference(result: EvaluationResult) -> str | None:
    """Return the comparison in a sentence, or why there is none; None for one model."""
    if result.no_comparison:
        return f"no difference of {' and '.join(model.name for model in result.models)}: {result.no_comparison}"
    if (found := result.comparison) is None:
        return None
    first, second = (model.name for model in result.models)
    what = "score (lower is better)" if found.lower_is_better else "accuracy"
    interval = "" if found.low is None else f" [{found.low:+.4f}, {found.high:+.4f}]"
    level = f"{100 * found.confidence:g}%"
    return (
        f"{what} of {second} - {first}: {found.difference:+.4f}{interval} ({level} interval of {found.num_items} "
        f"paired items), p = {found.p_value:.2g} (two-sided sign-flip test); better at {found.better} items, worse at "
        f"{found.worse}"
    )


QUIET_S = 10.0
"""seconds between two lines in a file or a pipe"""


@contextmanager
def showing_progress(progress: Callable[[], str]) -> Iterator[None]:
    """Show the progress of the evaluation until the end of the block.

    Args:
        progress: returns it in words; called in another thread.

    Yields:
        None.
    """
    console = ConsoleReporter(file=sys.stderr, quiet_s=QUIET_S)
    console.follow(progress)
    try:
        yield
    finally:
        console.close()


def continuing(name: str, num_there: int, num_expected: int, what: str) -> None:
    """Print that an evaluation continues, if a part of it exists.

    Args:
        name: name of the model.
        num_there: parts that an earlier command has written.
        num_expected: parts of the whole evaluation.
        what: the parts, such as "samples".
    """
    if num_there:
        print(f"{name}: continuing: {num_there} of {num_expected} {what} are there", file=sys.stderr, flush=True)


PAUSE_S = 0.5
"""least seconds between two versions of the record"""
COST = 0.05
"""share of the time that goes into the record, which is longer to write the more samples it has"""


@contextmanager
def recorded(candidate: Candidate, folder: Path) -> Iterator[None]:
    """Keep the record of a model up to date during the block, and write it once more at the end of the block.

    Each version of the record is made of the whole journal, so that no sample is in it twice. After a kill, the record
    lacks the samples that have ended since its last version. The continued evaluation writes it again.

    Args:
        candidate: the model, whose journal grows.
        folder: folder of the evaluation.

    Yields:
        None.
    """
    stopped = threading.Event()
    thread = threading.Thread(target=_follow, args=(candidate, folder, stopped), name="eval-record", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        with suppress(RliteError):  # the block's own error counts, or the next error of the same cause
            write_record(folder, candidate.name, candidate.rows)


def _follow(candidate: Candidate, folder: Path, stopped: threading.Event) -> None:
    num_written, pause = 0, 0.0
    while not stopped.wait(pause):
        begun = time.monotonic()
        if len(candidate.lines) > num_written:
            num_written = len(candidate.lines)
            try:
                write_record(folder, candidate.name, candidate.rows)
            except RliteError:
                return  # the record that is written at the end raises it; until then only readers lack something
        pause = max(PAUSE_S, (time.monotonic() - begun) / COST)
