"""`Owner`: a process, as other processes recognise it in a file that it has written."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import TypeAdapter, ValidationError

from rlite import files

LOCK = ".lock"
"""file of a run's folder that names the run's process"""
MAX_BYTES = 4096
"""bytes of such a file that are read"""
SAME_S = 60.0
"""largest difference between two readings of a process's start, whose clock may have been set meanwhile"""


@dataclass(frozen=True)
class Owner:
    """A process on one machine. Without a process id, it is one that has let go."""

    host: str = ""
    """name of the machine, and on Linux its namespace of process ids"""
    pid: int = 0
    started: float = 0.0
    """seconds since the epoch"""

    @classmethod
    def of_this_process(cls) -> Owner:
        """Return this process."""
        return cls(_here(), os.getpid(), psutil.Process().create_time())

    @property
    def is_gone(self) -> bool:
        """True if the process has ended or let go. A process on another machine may be there."""
        if not self.pid or self.host != _here():
            return not self.pid
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.started) < SAME_S
            return not is_same or process.status() == psutil.STATUS_ZOMBIE
        return True


_JSON = TypeAdapter(Owner)


def to_json(owner: Owner) -> str:
    """Return the content of a file that names its owner."""
    return _JSON.dump_json(owner).decode()


def read_owner(file: Path) -> Owner | None:
    """Return the owner that a file names, or None. The file may come from anyone."""
    try:
        with files.reading(file, file.parent) as stream:
            return _JSON.validate_json(stream.read(MAX_BYTES))
    except (OSError, ValidationError):
        return None


def _here() -> str:
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
