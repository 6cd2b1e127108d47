"""Owners and locks of folders: a process, as other processes recognise it in a file that it has written.

A lock belongs to its process (`lockf`): a forked child cannot keep it after a kill, and network file systems have it.
Within the process a table refuses a second lock, because the system would grant it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO
from weakref import WeakValueDictionary

import psutil
from pydantic import TypeAdapter, ValidationError

from rlite import files
from rlite.errors import FolderInUse

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


def read_owner(file: Path) -> Owner | None:
    """Return the owner that a file names, or None. The file may come from anyone."""
    with suppress(OSError, ValidationError), files.reading(file, file.parent) as stream:
        return _JSON.validate_json(stream.read(MAX_BYTES))
    return None


def _here() -> str:
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


class FolderLock:
    """Lock of a folder, held until `close` or the end of the process. Its file names the process.

    `made`: folders that were made for the lock, the innermost first.
    """

    def __init__(self, file: TextIO, path: Path, made: Sequence[Path], is_kept: bool) -> None:
        self._file, self._path, self._made, self._is_kept = file, path, made, is_kept
        self._pid = os.getpid()
        _held[_identity(os.fstat(file.fileno()))] = self
        self._name(Owner.of_this_process())

    def close(self) -> None:
        """Let other processes use the folder, and remove folders that were made for nothing else. Safe to repeat."""
        if self._file.closed or os.getpid() != self._pid:  # a forked child holds no lock
            return
        self._name(Owner())
        with suppress(OSError):  # somebody else has removed the file, or has put another one into a folder
            if not self._is_kept or (self._made and os.listdir(self._path.parent) == [self._path.name]):
                self._path.unlink()
            for folder in self._made:
                folder.rmdir()
        self._file.close()

    def _name(self, owner: Owner) -> None:
        self._file.truncate(0)
        self._file.write(_JSON.dump_json(owner).decode())
        self._file.flush()


_held: WeakValueDictionary[tuple[int, int], FolderLock] = WeakValueDictionary()
"""locks of this process, by device and number of the file"""


def lock_folder(folder: Path, name: str, in_use: str, is_kept: bool = False) -> FolderLock:
    """Keep other processes, and other users in this process, out of a folder."""
    folder = folder.absolute()
    while True:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # the last holder has just removed the folder
            if (file := _lock(folder / name, in_use)) is not None:
                return FolderLock(file, folder / name, made, is_kept)


def _lock(path: Path, in_use: str) -> TextIO | None:
    """Return the locked file, or None if its last holder removed it meanwhile."""
    path.touch()
    held = _held.get(_identity(path.stat()))
    if held is not None and not held._file.closed:  # before the file is opened: its close ends all locks of the process
        raise FolderInUse(in_use)
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            raise FolderInUse(in_use) from error
        # a file system without locks
    if os.fstat(file.fileno()).st_nlink:
        return file
    file.close()  # a lock of it would keep nobody out
    return None


def _identity(state: os.stat_result) -> tuple[int, int]:
    return state.st_dev, state.st_ino
