"""Fault points: places in a program under test at which an armed fault happens to the process that reaches them.

    test: board.arm(fault) ──> folder <── process: board.reach("rollout", "ROLLOUT")   it is in the phase now
                                 │
                 signals, errors ┴─> the process itself        master, node, heartbeat ──> test: board.request()

A fault happens once: the process that renames the armed file has it. Files of one folder are the only link, so that
processes of any kind, on any launcher, may have fault points.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rlite import files
from rlite.errors import RliteError

Phase = Literal["creation", "rollout", "reward", "training step", "weight sync", "checkpoint", "recovery"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""phases of a run, in the order of a step; recovery is everything between a failure and the next phase"""
Kind = Literal["SIGKILL", "SIGTERM", "SIGSTOP", "raise", "heartbeat", "master", "node"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""three signals to the process that is in the phase, an error that it raises, heartbeats of its node that are lost, the
killed master of its job, its killed Ray node"""


@dataclass(frozen=True, kw_only=True)
class PhaseFault:
    """A fault that happens while a process is in a phase of its run. `FaultBoard` makes it happen."""

    phase: Phase
    kind: Kind
    role: str
    """role of the process, in the program's own words; "" is any"""
    skip: int = 0
    """visits of the phase before the fault"""

    def __str__(self) -> str:
        return f"{self.kind} in {self.phase} of {self.role or 'any process'}"


SERVED_S = 60.0
"""seconds that a process waits in its phase for a fault from outside"""
SILENCE_S = 10.0
"""seconds that a process stays in its phase while the heartbeats of its node are lost"""
POLL_S = 0.01


class InjectedError(RliteError):
    """An injected error."""


class FaultBoard:
    """Folder with the armed fault and the faults that have happened."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    # The test's side

    def arm(self, fault: PhaseFault) -> None:
        """Let a fault happen at the next process that fits it."""
        for name in ("hit", "request"):
            self._path(name).unlink(missing_ok=True)
        self._path("visits").write_text("")
        files.replace(self._path("armed"), json.dumps(asdict(fault)).encode())

    def disarm(self) -> None:
        """Take back a fault that has not happened."""
        self._path("armed").unlink(missing_ok=True)

    @property
    def is_armed(self) -> bool:
        """True if the fault has not happened yet."""
        return self._path("armed").exists()

    def request(self) -> dict[str, str] | None:
        """Return the `kind`, `pid` and `place` of a fault from outside that a process waits for, or None."""
        return self._read("request")

    def serve(self) -> None:
        """Let the process go on that waits for a fault from outside."""
        self._path("request").unlink(missing_ok=True)

    # The side of the program under test

    def reach(self, phase: Phase, role: str, place: str = "") -> None:
        """Suffer the armed fault, if it is for this phase and role."""
        if (armed := self._read("armed")) is None:
            return
        fault = PhaseFault(**armed)
        if fault.phase != phase or fault.role not in ("", role):
            return
        with self._path("visits").open("a") as file:
            file.write("x")
        if self._path("visits").stat().st_size <= fault.skip:
            return
        try:
            os.rename(self._path("armed"), self._path("hit"))
        except FileNotFoundError:  # another process was faster
            return
        self._suffer(fault, place)

    def _suffer(self, fault: PhaseFault, place: str) -> None:
        if fault.kind in ("SIGKILL", "SIGTERM", "SIGSTOP"):
            os.kill(os.getpid(), signal.Signals[fault.kind])
            time.sleep(0.0 if fault.kind == "SIGSTOP" else 1.0)  # a handler of SIGTERM may let the process go on
        elif fault.kind == "raise":
            raise InjectedError(f"injected: {fault}")
        else:
            request = self._path("request")
            told = {"kind": fault.kind, "pid": str(os.getpid()), "place": place}
            files.replace(request, json.dumps(told).encode())
            deadline = time.monotonic() + SERVED_S
            while request.exists() and time.monotonic() < deadline:
                time.sleep(POLL_S)
            time.sleep(SILENCE_S if fault.kind == "heartbeat" else 0.0)  # it is to be found in this phase

    def _read(self, name: str) -> Any:
        with suppress(FileNotFoundError, ValueError):
            return json.loads(self._path(name).read_text())
        return None

    def _path(self, name: str) -> Path:
        return self._folder / f"fault-{name}"
