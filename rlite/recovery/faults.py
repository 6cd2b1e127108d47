"""What can happen to a run from outside, as plain data. `rlite.recovery.injectors` makes it happen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["driver", "agent", "rank", "worker", "control", "sandbox"]
"""driver: the program. agent: torchrun's. rank: a process of torchrun's. worker: a process of Ray's with our workers.
control: Ray's control service (GCS). sandbox: a process that runs rewards or environments."""
SignalName = Literal["SIGKILL", "SIGTERM", "SIGSTOP"]


@dataclass(frozen=True, kw_only=True)
class SignalFault:
    """A process gets a signal."""

    role: Role
    signal: SignalName
    index: int = 0
    """which process of that role, counted modulo how many there are"""
    seconds: float = 1.0
    """how long SIGSTOP lasts, before SIGCONT"""

    @property
    def ends_run(self) -> bool:
        """The run is to end, and to be resumed; otherwise it is to go on by itself."""
        return self.role != "sandbox" and self.signal != "SIGSTOP"

    def __str__(self) -> str:
        return f"{self.signal} {self.role}"


@dataclass(frozen=True, kw_only=True)
class FileSizeFault:
    """A process can write no file beyond so many bytes from now on, as on a disk that is full."""

    role: Role
    num_bytes: int = 0
    index: int = 0

    ends_run = True

    def __str__(self) -> str:
        return f"full disk {self.role}"


@dataclass(frozen=True, kw_only=True)
class HalfOpenFault:
    """Connections to a port that send the beginning of a request, or nothing, and are held open."""

    port: int
    host: str = "127.0.0.1"
    count: int = 1500
    seconds: float = 5.0
    greeting: bytes = b""


@dataclass(frozen=True, kw_only=True)
class FloodFault:
    """Bytes into every descriptor that the calling process may write to, but for its standard ones."""

    payload: bytes
    num_bytes: int = 64 << 20
    """at most, over all descriptors"""
    seconds: float = 2.0


ProcessFault = SignalFault | FileSizeFault
