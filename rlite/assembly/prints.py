"""The observer of what rewards, environments and tools print in their processes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlite import config, files
from rlite.assembly.proof.privacy import masked
from rlite.config import Options
from rlite.errors import StorageError, shortened, writing
from rlite.rollout.episode import Episode, current_episode
from rlite.runtime.sandbox.prints import listen
from rlite.services.console.sinks import drop_later_lines
from rlite.trainer.callbacks import Metrics
from rlite.trainer.run.folder import PRINTS
from rlite.trainer.run.observer import Console, Observer
from rlite.trainer.run.training_run import TrainingRun
from rlite.yaml_texts import flat

MAX_FILE = 8 << 20
"""bytes of the file; its older half is dropped beyond it"""
MAX_KINDS = 4
"""texts of a function that the console shows; other numbers and quoted texts make no other kind"""
NAMING = ("env_vars", "tool_env_vars", "key_env")
"""last parts of options that name variables of the environment which functions may have"""


class Prints:
    """Shows what functions print in sandbox processes once for each kind, and keeps it in a file.

    Args:
        console: shows it.
        options: options of the run or the command, which name variables that hold secrets.
        path: the file; None keeps nothing.
        of_line: returns further fields of a line, given the episode of the call.
    """

    def __init__(
        self, console: Console, options: Options, path: Path | None, of_line: Callable[[Episode | None], dict[str, Any]]
    ) -> None:
        self._console, self._path, self._of_line, self._lock = console, path, of_line, threading.Lock()
        named = [value for key, value in flat(config.to_container(options)) if key.rpartition(".")[2] in NAMING]
        self._variables = [name for own in named for name in (own if isinstance(own, list) else [own])]
        self._kinds: dict[str, set[str]] = {}

    def take(self, what: str, text: str) -> None:
        """Keep and show what a call has printed, in the task of the call."""
        episode, text = current_episode(), masked(text, self._variables)
        line = {**self._of_line(episode), "function": what, "text": text}
        if episode is not None:
            line |= {"row": episode.item, "sample": episode.sample}
        with self._lock:
            self._show(what, text, line.get("row", ""))
            try:
                self._keep(f"{json.dumps(line)}\n".encode())
            except StorageError as error:  # no print is worth a run
                self._path = None
                self._console.warn("what functions print is not kept from here on", {"reason": error})

    def _keep(self, line: bytes) -> None:
        if (path := self._path) is None:
            return
        with writing(path):
            if path.exists() and path.stat().st_size > MAX_FILE:
                lines = path.read_bytes().splitlines(keepends=True)
                files.replace(path, b"".join(lines[len(lines) // 2 :]))
            with path.open("ab") as file:
                file.write(line)

    def _show(self, what: str, text: str, row: object) -> None:
        shown, kind = self._kinds.setdefault(what, set()), re.sub(r"'[^']*'|\"[^\"]*\"|[\d.]+", "#", text)
        if kind not in shown and len(shown) < MAX_KINDS:
            shown.add(kind)
            rows = {"row": row, "text": shortened(text) if len(text) > 400 else text.strip()}
            if self._path is not None:
                is_last = len(shown) == MAX_KINDS
                rows[PRINTS] = "all, and other kinds of text are there alone" if is_last else "all that it prints"
            self._console.report(f"{what} printed", rows)


class PrintLog(Observer):
    """Lets `Prints` show and keep what functions print during a run.

    Args:
        run: the run.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._path = run.folder / PRINTS

    def on_start(self, run: TrainingRun, metrics: Metrics) -> None:
        """Drop what the steps that are made again have printed, and begin to listen."""
        if self._path.exists():
            drop_later_lines(self._path, run.step)
        listen(Prints(run.console, run.config, self._path, lambda episode: step_of(run, episode)).take)

    def close(self, run: TrainingRun, error: BaseException | None) -> None:
        """Listen no more."""
        listen(None)


def step_of(run: TrainingRun, episode: Episode | None) -> dict[str, Any]:
    """Return the step for which an episode runs: the next one if it is trained on, else the last one."""
    return {"step": run.step + (episode is not None and episode.is_trained)}
