"""The console: a start-up panel, a progress bar with the time left, and one line of metrics per step.

On a terminal it is drawn with rich; into a file or a pipe it is plain text, one line per step, no control characters.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

DEFAULT_METRICS = ("loss", "reward", "score", "accuracy", "kl", "entropy", "clip_fraction", "grad_norm", "lr")
_RECENT = 20
"""steps over which the pace is measured"""


class ConsoleReporter:
    """A metric sink for people.

    `metrics` are the keys to show, in that order, where present; a key also matches as the last part of a longer one
    (`loss` shows `actor/loss` if there is no `loss`). `total_steps` gives the bar its end, `done_steps` where a
    resumed run starts.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        metrics: Sequence[str] = DEFAULT_METRICS,
        done_steps: int = 0,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file or sys.stdout
        self._console = Console(file=self._file, highlight=False, markup=False, emoji=False)
        self._metrics = tuple(metrics)
        self._total = total_steps
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque([(clock(), done_steps)], maxlen=_RECENT + 1)
        self._progress: Progress | None = None

    def report(self, title: str, rows: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> None:
        """Print a titled table of names and values."""
        pairs = list(rows.items() if isinstance(rows, Mapping) else rows)
        if not self._console.is_terminal:
            width = max((len(str(name)) for name, _ in pairs), default=0)
            self._print(title, *(f"  {name!s:<{width}}  {value}" for name, value in pairs))
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold cyan", no_wrap=True)
        table.add_column()
        for name, value in pairs:
            table.add_row(str(name), str(value))
        self._console.print(Panel(table, title=Text(title, "bold"), title_align="left", box=box.ROUNDED, expand=False))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the chosen metrics of a step and move the bar."""
        self._seen.append((self._clock(), step))
        chosen = "  ".join(self._chosen(metrics))
        pace = self._pace()
        if not self._console.is_terminal:
            of_total = f"/{self._total}" if self._total else ""
            self._print("  ".join(part for part in (f"step {step}{of_total}", chosen, pace) if part))
            return
        if self._progress is None:
            self._progress = self._start_progress()
        self._progress.console.print(Text.assemble((f"step {step:>5}", "dim"), "  ", chosen))
        self._progress.update(self._progress.task_ids[0], completed=step, pace=pace)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _start_progress(self) -> Progress:
        progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[pace]}"),
            console=self._console,
        )
        progress.add_task("training", total=self._total, completed=self._seen[0][1], pace="")
        progress.start()
        return progress

    def _chosen(self, metrics: Mapping[str, float]) -> Iterator[str]:
        for key in self._metrics:
            found = key if key in metrics else next((name for name in metrics if name.endswith(f"/{key}")), None)
            if found is not None:
                yield f"{key} {_compact(metrics[found])}"

    def _pace(self) -> str:
        (first, first_step), (last, last_step) = self._seen[0], self._seen[-1]
        if last_step <= first_step:
            return ""
        seconds = (last - first) / (last_step - first_step)
        pace = f"{_compact(seconds)} s/step"
        if not self._total:
            return pace
        return f"{pace}  {timedelta(seconds=round(seconds * max(0, self._total - last_step)))} left"

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._file.write(f"{line}\n")
        self._file.flush()


def _compact(value: float) -> str:
    return f"{float(value):.4g}"
