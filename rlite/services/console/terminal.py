"""The console: a start-up panel, one line of metrics per step, progress while a step waits, and alarms.

On a terminal it is drawn with rich: columns with a header, a bar with the time left, panels with coloured frames. In a
pipe or a file it is plain text without control characters, and each step is one line of `key value` pairs.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rlite.errors import did_you_mean
from rlite.services.console.sinks import read_metrics
from rlite.trainer.run import observer
from rlite.wording import number

Choice = Literal["auto", "all"] | Sequence[str]
"""auto: the trainer's own choice; all metrics; or a list of names"""

LABELS = {
    "tokens_per_second": "tokens/s",
    "response_length": "length",
    "num_tokens": "tokens",
    "grad_norm": "grad",
    "logprob_drift": "drift",
    "test_accuracy": "test_acc",
    "turns": "turns/ep",
}
"""short titles of columns"""
LAG = "lag_steps"
"""metric of an evaluation: steps since the evaluated weights"""
WIDTH = 8
"""characters of the narrowest column"""
GAP = 2


def find(key: str, metrics: Collection[str], evaluated: Collection[str] = ()) -> str | None:
    """Return the metric that a name means: itself, or else the first metric that it is the last part of."""
    if key in metrics:
        return key
    return next((name for name in metrics if name.endswith(f"/{key}") and name not in evaluated), None)


class Columns:
    """Columns of a table that grows by one row for each step. A column begins with the first row that has its metric.

    `auto`: metrics that "auto" stands for, the most important first. `evaluated`: metrics of evaluations, which only
    some steps have.
    """

    def __init__(self, choice: Choice, auto: Sequence[str], evaluated: Collection[str] = ()) -> None:
        self._wanted = None if choice == "all" else tuple(auto if isinstance(choice, str) else choice)
        self.may_drop = choice == "auto"
        """true if a line without room leaves the last metrics out"""
        self._evaluated = frozenset(evaluated)
        self._seen: dict[str, None] = {}

    def chosen(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the values to show of a step, by the name that was asked for."""
        wanted = tuple(metrics) if self._wanted is None else self._wanted
        names = {key: find(key, metrics, self._evaluated) for key in wanted}
        return {key: metrics[name] for key, name in names.items() if name is not None}

    def unknown(self, metrics: Collection[str], later: Collection[str]) -> dict[str, str]:
        """Return a hint for each name that was asked for and is no metric."""
        names = () if self.may_drop else self._wanted or ()
        known = {*metrics, *later, *self._evaluated}
        return {repr(name): did_you_mean(name, known) for name in names if find(name, known, self._evaluated) is None}

    def fit(self, metrics: Mapping[str, float], width: int) -> list[str] | None:
        """Return the columns of a row, in the order of the choice; None if the metrics asked for need more width."""
        self._seen |= dict.fromkeys(self.chosen(metrics))
        columns = [key for key in self._wanted or self._seen if key in self._seen]
        ends = [sum(GAP + _width(key) for key in columns[: index + 1]) for index in range(len(columns))]
        fitting = [key for key, end in zip(columns, ends, strict=True) if end <= width]
        return fitting if self.may_drop or len(fitting) == len(columns) else None


def _aligned(columns: Sequence[str], texts: Mapping[str, str]) -> str:
    """Return texts, each at the right end of its column, "-" in a column without a text."""
    return "".join(f"{'':{GAP}}{texts.get(key, '-'):>{_width(key)}}" for key in columns)


def _width(key: str) -> int:
    return max(WIDTH, len(LABELS.get(key, key)))


DEFAULT_METRICS = ("loss", "reward", "score", "accuracy", "kl", "entropy", "clip_fraction", "grad_norm", "lr")
LOST, FINISHED = "rollout/num_lost", "rollout/num_groups"
"""metrics that count a step's lost and finished groups"""
_RECENT = 20
"""steps over which the pace is measured"""
_HEADER_EVERY = 20
"""steps after which the header is repeated"""
_POLL_S = 1.0
"""seconds between two looks at the progress"""
_QUIET_S = 30.0
"""seconds without a line after which a pipe gets a line of progress"""
_PLAIN_WIDTH = 9
"""characters of a value in a pipe, so that the values of consecutive lines are aligned"""
_PLAIN_COLUMNS = 165
"""characters of the metrics of a line in a pipe, unless all or named metrics are asked for"""
NARROW = 64
"""characters of a terminal below which there is no bar beside the numbers"""
PIPE_WIDTH = 200
"""characters of a line of a table in a pipe or a file"""


class TextConsole(Console):
    """A console of rich for texts that hold no markup. In a pipe or a file, lines may be `PIPE_WIDTH` wide."""

    def __init__(self, file: TextIO | None = None) -> None:
        super().__init__(file=file, highlight=False, markup=False, emoji=False)
        if not self.is_terminal:
            self.width = PIPE_WIDTH

    def on_broken_pipe(self) -> None:
        """Raise the error again, which the command handles."""
        raise  # rich calls this method where it handles the error


class ConsoleReporter(observer.Console):
    """A metric sink for readers. Its methods may be called in any thread.

    `choice` and `metrics` are the keys to show, in that order, where present. A key also matches as the last part of a
    longer one (`loss` shows `actor/loss` if there is no `loss`). A name in `choice` that is no metric is reported.
    `evaluated` are metrics of evaluations: the first step need not have them, and only their whole names match.
    `total_steps` gives the bar its end, `done_steps` where a resumed run starts.
    In a pipe, a line of progress follows after `quiet_s` seconds without a line.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        metrics: Sequence[str] = DEFAULT_METRICS,
        choice: Choice = "auto",
        evaluated: Sequence[str] = (),
        done_steps: int = 0,
        file: TextIO | None = None,
        quiet_s: float = _QUIET_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file or sys.stdout
        self._console = TextConsole(self._file)
        self._columns = Columns(choice, metrics, evaluated)
        self._later: Sequence[str] | None = metrics
        self._total, self._quiet_s, self._clock = total_steps, quiet_s, clock
        self._seen: deque[tuple[float, int]] = deque([(clock(), done_steps)], maxlen=_RECENT + 1)
        self._progress: Progress | None = None
        self._shown: list[str] | None = None
        self._num_rows = 0
        """rows below the last header"""
        self._printed_at = clock()
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._follower: threading.Thread | None = None

    # -- reports -------------------------------------------------------------------------------------------------

    def report(self, title: str, rows: Mapping[str, Any] | Sequence[tuple[str, Any]], style: str = "") -> None:
        """Print a titled table of names and values."""
        given = rows.items() if isinstance(rows, Mapping) else rows
        pairs = [(self._encodable(name), self._encodable(value)) for name, value in given]
        if not self._console.is_terminal:
            width = max((len(name) for name, _ in pairs), default=0)
            self._print(title, *(_row(name, value, width) for name, value in pairs))
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for pair in pairs:
            table.add_row(*pair)
        heading = Text(title, f"bold {style}".strip())
        is_long = len(title) > self._console.width - 6  # a frame would cut its title
        framed = Panel.fit(table, title=None if is_long else heading, title_align="left", border_style=style or "none")
        with self._lock:
            self._console.print(*([heading] if is_long else []), framed, sep="\n")
            self._num_rows = 0

    # -- steps ---------------------------------------------------------------------------------------------------

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the chosen metrics of a step and move the bar."""
        with self._lock:
            self._seen.append((self._clock(), step))
            if step and self._later is not None:  # names that are no metrics are told at the first step
                if unknown := self._columns.unknown(metrics, self._later):
                    self.warn("trainer.console: no such metric", unknown)
                self._later = None
            if not self._console.is_terminal:
                self._print(self._plain_line(step, metrics))
                return
            bar = self._bar()
            for text in self._lines(step, metrics):
                bar.console.print(text, soft_wrap=True)
            bar.update(bar.task_ids[0], completed=step, pace=self._pace(), description="training")

    def note(self, text: str) -> None:
        """Show how far the work under way is: beside the bar, or in a pipe as a line after `quiet_s` without one.

        `text`: such as "rollout: 12 of 64 episodes, 3,456 tokens".
        """
        with self._lock:
            if self._closed.is_set():
                return
            if self._console.is_terminal:
                bar = self._bar()
                bar.update(bar.task_ids[0], description=text)
            elif self._clock() - self._printed_at >= self._quiet_s:
                self._print(text)

    def follow(self, poll: Callable[[], str]) -> None:
        """Call `note` every second with the progress that `poll` returns, until `close`.

        `poll`: called in a thread of the console; returns at once, "" if nothing is under way.
        """

        def look() -> None:
            while not self._closed.wait(_POLL_S):
                if text := poll():
                    self.note(text)

        self._follower = threading.Thread(target=look, name="rlite-console", daemon=True)
        self._follower.start()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._closed.set()
        if self._follower is not None:
            self._follower.join()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    # -- texts ---------------------------------------------------------------------------------------------------

    def _lines(self, step: int, metrics: Mapping[str, float]) -> list[Text]:
        """Return the lines of a step for a terminal, with a header where it is due."""
        values, title = self._columns.chosen(metrics), self._step(step)
        texts = {key: number(key, value) for key, value in values.items()}
        below = [(_lost(metrics), "yellow"), (_lagging(step, metrics), "dim")]
        notes = [Text(f"{'':{len(title)}}  {text}", style) for text, style in below if text]
        columns = self._columns.fit(metrics, self._console.width - len(title))
        if columns is None:
            pairs = [f"{key} {text}" for key, text in texts.items()]
            return [Text(f"step {title.strip()}", "bold"), *map(Text, _grid(pairs, self._console.width)), *notes]
        lines = [Text.assemble((title, "dim"), _aligned(columns, texts)), *notes]
        if columns != self._shown or self._num_rows % _HEADER_EVERY == 0:
            labels = {key: LABELS.get(key, key) for key in columns}
            lines.insert(0, Text(f"{'step':>{len(title)}}{_aligned(columns, labels)}", "bold"))
            self._shown, self._num_rows = columns, 0
        self._num_rows += 1
        return lines

    def _plain_line(self, step: int, metrics: Mapping[str, float]) -> str:
        values, title = self._columns.chosen(metrics), self._step(step)
        large = {key for key, value in values.items() if math.isfinite(value) and abs(value) >= 10_000}
        texts = {key: f"{key} {value:.0f}" if key in large else f"{key} {value:.4g}" for key, value in values.items()}
        columns = self._columns.fit(metrics, sys.maxsize) or ()
        while self._columns.may_drop and sum(len(key) + 3 + _PLAIN_WIDTH for key in columns) > _PLAIN_COLUMNS:
            columns = columns[:-1]
        pairs = [f"{texts.get(key, ''):<{len(key) + 1 + _PLAIN_WIDTH}}" for key in columns]
        parts = [f"step {title.strip():<{len(title)}}", *pairs, _lost(metrics), _lagging(step, metrics), self._pace()]
        return "  ".join(part for part in parts if part).rstrip()

    def _step(self, step: int) -> str:
        of_total = f"/{self._total}" if self._total else ""
        return f"{step}{of_total}".rjust(max(5, 2 * len(str(self._total or 0)) + 1))

    def _pace(self) -> str:
        (first, first_step), (last, last_step) = self._seen[0], self._seen[-1]
        if last_step <= first_step:
            return ""
        seconds = (last - first) / (last_step - first_step)
        left = timedelta(seconds=round(seconds * max(0, (self._total or 0) - last_step)))
        return f"{seconds:.3g} s/step" + (f"  {left} left" if self._total else "")

    def _bar(self) -> Progress:
        if self._progress is None:
            is_narrow = self._console.width < NARROW
            self._progress = Progress(
                TextColumn("{task.description}", style="bold", markup=False),
                *([] if is_narrow else [BarColumn(bar_width=10 if self._console.width < 100 else 24)]),
                *([MofNCompleteColumn()] if self._total else []),
                *([] if is_narrow else [TimeElapsedColumn()]),
                TextColumn("[dim]{task.fields[pace]}"),
                console=self._console,
                refresh_per_second=2,
            )
            self._progress.add_task("training", total=self._total, completed=self._seen[-1][1], pace="")
            self._progress.start()
        return self._progress

    def _encodable(self, value: object) -> str:
        """Return a text in which characters that the file's encoding lacks are written as their numbers."""
        encoding = self._file.encoding or "utf-8"
        return str(value).encode(encoding, "backslashreplace").decode(encoding)

    def _print(self, *lines: str) -> None:
        with self._lock:
            print(*lines, sep="\n", file=self._file, flush=True)
            self._printed_at = self._clock()


def _row(name: str, value: str, width: int) -> str:
    """Return a row of a table in a pipe, whose further lines stand below the first one."""
    room = PIPE_WIDTH - width - 4
    wrapped = (wrap(line, room, break_long_words=False, break_on_hyphens=False) for line in value.splitlines())
    lines = [part for parts in wrapped for part in parts or [""]]
    return f"  {name:<{width}}  " + f"\n{'':{width + 4}}".join(lines)


def _lost(metrics: Mapping[str, float]) -> str:
    """Return in words how many groups of a step were lost; "" if none was."""
    lost = metrics.get(LOST, 0)
    return f"{lost:g} of {lost + metrics.get(FINISHED, 0):g} groups lost" if lost else ""


def _lagging(step: int, metrics: Mapping[str, float]) -> str:
    """Return the step of the evaluated weights in words, if it is an earlier step; else ""."""
    lags = {name.rpartition("/")[0]: lag for name, lag in metrics.items() if name.rpartition("/")[2] == LAG and lag}
    return ", ".join(f"{f'evaluation {name}'.strip()} of step {step - lag:g}" for name, lag in lags.items())


def _grid(cells: Sequence[str], width: int) -> list[str]:
    """Return cells in as many columns as fit into a width, row by row."""
    wide = max(map(len, cells), default=0) + 2
    per_row = max(1, width // wide)
    rows = [cells[start : start + per_row] for start in range(0, len(cells), per_row)]
    return ["  " + "".join(cell.ljust(wide) for cell in cells).rstrip() for cells in rows]


TENTH = 10
Names = Sequence[str]


class History:
    """The values of some metrics over the steps of a run.

    `evaluated`: metrics of evaluations, of which the first, the last and the best value count. `trained`: metrics of
    every step, of which the means over the first and the last tenth of the steps count.
    """

    def __init__(
        self, evaluated: Names, trained: Names, lowest: Collection[str] = (), chosen: str | None = None
    ) -> None:
        self._evaluated, self._trained, self._lowest, self._chosen = evaluated, trained, lowest, chosen
        self._values: dict[str, dict[int, float]] = {name: {} for name in (*evaluated, *trained)}

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step. A value of an evaluation is of the step of the evaluated weights."""
        for key, values in self._values.items():
            if (name := find(key, metrics, self._evaluated)) is not None:
                lag = metrics.get(f"{name.rpartition('/')[0]}/{LAG}".lstrip("/"), 0) if key in self._evaluated else 0
                if math.isfinite(value := float(metrics[name])) and math.isfinite(lag):
                    values[step - int(lag)] = value

    def read(self, path: Path) -> None:
        """Take the metrics of earlier steps from a file of JSON lines, if there is one that can be read."""
        with suppress(OSError):
            for row in read_metrics(path):
                self.add(int(row["step"]), row)

    def rows(self) -> dict[str, str]:
        """Return the change of each metric that has at least two values, in words. Equal texts appear once."""
        texts = {key: self._of_evaluations(key) for key in self._evaluated}
        texts |= {key: _of_steps(key, self._values[key]) for key in self._trained}
        first_with = {text: key for key, text in reversed(texts.items()) if text}
        return {key: text for text, key in reversed(first_with.items())}

    def _of_evaluations(self, key: str) -> str:
        values = self._values[key]
        if len(values) < 2:
            return ""
        (first, before), (last, after) = min(values.items()), max(values.items())
        best = (min if key in self._lowest else max)(sorted(values), key=values.__getitem__)
        text = f"{number(key, before)} at step {first} -> {number(key, after)} at step {last}"
        is_told = number(key, values[best]) == number(key, after) or key == self._chosen
        return text if is_told else f"{text}, best {number(key, values[best])} at step {best}"


def _of_steps(key: str, values: Mapping[int, float]) -> str:
    ordered = [values[step] for step in sorted(values)]
    if len(ordered) < 2:
        return ""
    count = max(1, len(ordered) // TENTH)
    means = fmean(ordered[:count]), fmean(ordered[-count:])
    steps = "step" if count == 1 else f"{count} steps"
    return f"{number(key, means[0])} -> {number(key, means[1])}, means of the first and of the last {steps}"
