"""The observer of what rewards, environments and tools print in their processes."""

from __future__ import annotations

import json
import re
import threading

from rlite import config, files
from rlite.assembly.proof.privacy import masked
from rlite.errors import StorageError, shortened, writing
from rlite.rollout.episode import current_episode
from rlite.runtime.sandbox.prints import listen
from rlite.services.console.sinks import drop_later_lines
from rlite.trainer.callbacks import Metrics
from rlite.trainer.run.folder import PRINTS
from rlite.trainer.run.observer import Observer
from rlite.trainer.run.training_run import TrainingRun
from rlite.yaml_texts import flat

MAX_FILE = 8 << 20
"""bytes of the file; its older half is dropped beyond it"""
MAX_KINDS = 4
"""texts of a function that the console shows; other numbers and quoted texts make no other kind"""
NAMING = ("env_vars", "tool_env_vars", "key_env")
"""last parts of options that name variables of the environment which functions may have"""


class PrintLog(Observer):
    """Shows what functions print in sandbox processes once for each kind, and keeps it in the run's folder.

    Args:
        run: the run.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._path, self._lock = run, run.folder / PRINTS, threading.Lock()
        named = [value for key, value in flat(config.to_container(run.config)) if key.rpartition(".")[2] in NAMING]
        self._variables = [name for own in named for name in (own if isinstance(own, list) else [own])]
        self._kinds: dict[str, set[str]] = {}

    def on_start(self, run: TrainingRun, metrics: Metrics) -> None:
        """Drop what the steps that are made again have printed, and begin to listen."""
        if self._path.exists():
            drop_later_lines(self._path, run.step)
        listen(self._take)

    def close(self, run: TrainingRun, error: BaseException | None) -> None:
        """Listen no more."""
        listen(None)

    def _take(self, what: str, text: str) -> None:
        """Keep what a call has printed, in the task of the call."""
        episode, text = current_episode(), masked(text, self._variables)
        line = {"step": self._run.step, "function": what, "text": text}
        if episode is not None:
            line |= {"step": self._run.step + episode.is_trained, "row": episode.item, "sample": episode.sample}
        with self._lock:
            self._show(what, text, line.get("row", ""))
            try:
                self._keep(f"{json.dumps(line)}\n".encode())
            except StorageError as error:  # no print is worth a run
                listen(None)
                self._run.console.warn("what functions print is not kept from here on", {"reason": error})

    def _keep(self, line: bytes) -> None:
        with writing(self._path):
            if self._path.exists() and self._path.stat().st_size > MAX_FILE:
                lines = self._path.read_bytes().splitlines(keepends=True)
                files.replace(self._path, b"".join(lines[len(lines) // 2 :]))
            with self._path.open("ab") as file:
                file.write(line)

    def _show(self, what: str, text: str, row: object) -> None:
        shown, kind = self._kinds.setdefault(what, set()), re.sub(r"'[^']*'|\"[^\"]*\"|[\d.]+", "#", text)
        if kind not in shown and len(shown) < MAX_KINDS:
            shown.add(kind)
            rest = "all that it prints" if len(shown) < MAX_KINDS else "all, and other kinds of text are there alone"
            rows = {"row": row, "text": shortened(text) if len(text) > 400 else text.strip(), PRINTS: rest}
            self._run.console.report(f"{what} printed", rows)
