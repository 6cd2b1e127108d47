"""Facts of a run from its chain: its command, its code, its length, and how it ended."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlite import files
from rlite.services.record.chain import BEGINS, END
from rlite.trainer.run.folder import CHAIN

TEXTS = ("trainer", "command", "commit")
MAX_TEXT, MAX_KEYS = 4000, 2000
"""characters of a text, and options that a user has set, that are kept"""


class ChainLog:
    """Reader of the newest start and end of a run. The file may come from anyone, and need not exist.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file = files.GrowingFile(folder / CHAIN)
        self._begin()

    def _begin(self) -> None:
        self.begun: dict[str, Any] = {}
        """trainer, command, commit, version, total_steps, keys that are set, and Unix time of the newest start"""
        self.ended: dict[str, Any] | None = None
        """step and kind of the error of the newest end; None if the run has not ended by itself since it began"""

    def refresh(self) -> bool:
        """Read new links. Those that cannot be read say nothing; an audit names them.

        Returns:
            True if the run has begun or ended since.
        """
        before = self.begun, self.ended
        with suppress(OSError):
            for line in self._file.new_lines(self._begin):
                with suppress(ValueError, TypeError, AttributeError, OverflowError, RecursionError):
                    self._take(json.loads(line))
        return (self.begun, self.ended) != before

    def _take(self, link: Mapping[str, Any]) -> None:
        if link.get("kind") in BEGINS:
            self.begun, self.ended = _start(link), None
        elif link.get("kind") == END:
            self.ended = {"step": int(link.get("step", 0)), "error": str(link.get("error", ""))[:MAX_TEXT]}

    def state(self, last_step: int, total_steps: int | None, is_gone: bool) -> str:
        """Return finished, stopped or crashed; "" if the run may be under way.

        Args:
            last_step: last step of the metrics.
            total_steps: steps of the whole run, if known.
            is_gone: the run's process has ended.
        """
        error = None if self.ended is None else self.ended["error"]
        if error or (error is None and is_gone and self.begun):
            return "stopped" if error == "KeyboardInterrupt" else "crashed"
        if error is None and not is_gone:
            return ""
        return "finished" if total_steps is not None and last_step >= total_steps else "stopped"


def _start(link: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {name: str(link.get(name) or "")[:MAX_TEXT] for name in TEXTS}
    versions, keys = link.get("versions"), link.get("set")
    facts["version"] = str(versions.get("rlite", ""))[:MAX_TEXT] if isinstance(versions, Mapping) else ""
    facts["set"] = [str(key)[:MAX_TEXT] for key in keys[:MAX_KEYS]] if isinstance(keys, list) else None
    facts["total_steps"] = total if type(total := link.get("total_steps")) is int else None
    facts["at"] = at if isinstance(at := link.get("at"), float) and math.isfinite(at) else None
    return facts
