"""Faults from outside that can hit a run, as plain data. `rlite.recovery.injectors` makes them happen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Role = Literal["driver", "agent", "rank", "worker", "control", "sandbox"]
"""driver: the program. agent: torchrun's. rank: a process of torchrun's. worker: a process of Ray's with our workers.
control: Ray's control service (GCS). sandbox: a process that runs rewards or environments."""
SignalName = Literal["SIGKILL", "SIGTERM", "SIGSTOP"]


@dataclass(frozen=True, kw_only=True)
class SignalFault:
    """A signal sent to a process."""

    role: Role
    signal: SignalName
    index: int = 0
    """number of the process in the role, modulo the number of processes"""
    seconds: float = 1.0
    """seconds between SIGSTOP and SIGCONT"""

    @property
    def ends_run(self) -> bool:
        """Return True if the fault ends the run, which is then resumed. Otherwise the run continues by itself."""
        return self.role != "sandbox" and self.signal != "SIGSTOP"

    def __str__(self) -> str:
        return f"{self.signal} {self.role}"


@dataclass(frozen=True, kw_only=True)
class FileSizeFault:
    """A limit on the size of every file that a process writes from now on, as on a full disk."""

    role: Role
    num_bytes: int = 0
    index: int = 0

    ends_run = True

    def __str__(self) -> str:
        return f"full disk {self.role}"


@dataclass(frozen=True, kw_only=True)
class HalfOpenFault:
    """Connections to a port that are held open after a part of a request, or after nothing."""

    port: int
    host: str = "127.0.0.1"
    count: int = 1500
    seconds: float = 5.0
    greeting: bytes = b""


@dataclass(frozen=True, kw_only=True)
class FloodFault:
    """Bytes written to every descriptor that the calling process may write to, except the standard ones."""

    payload: bytes
    num_bytes: int = 64 << 20
    """at most, over all descriptors"""
    seconds: float = 2.0


ProcessFault = SignalFault | FileSizeFault

Phase = Literal["creation", "rollout", "reward", "training step", "weight sync", "checkpoint", "recovery"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""phases of a run, in the order of a step; recovery is everything between a failure and the next phase"""
Kind = Literal["SIGKILL", "SIGTERM", "SIGSTOP", "raise", "heartbeat", "master", "node"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""three signals to the process that is in the phase, an error that it raises, heartbeats of its node that are lost, the
killed master of its job, its killed Ray node"""


@dataclass(frozen=True, kw_only=True)
class PhaseFault:
    """A fault that happens while a process is in a phase of its run. `rlite.recovery.faultpoints` makes it happen."""

    phase: Phase
    kind: Kind
    role: str
    """role of the process, in the program's own words; "" is any"""
    skip: int = 0
    """visits of the phase before the fault"""

    def __str__(self) -> str:
        return f"{self.kind} in {self.phase} of {self.role or 'any process'}"
