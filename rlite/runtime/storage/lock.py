"""Locks of folders: one process at a time, until it lets go or ends, in whatever way.

A lock belongs to its process (`lockf`): a forked child cannot keep it after a kill, and network file systems have it.
Within the process a table refuses a second lock, because the system would grant it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO
from weakref import WeakValueDictionary

from rlite.errors import FolderInUse
from rlite.runtime.owner import Owner, to_json


class FolderLock:
    """Lock of a folder, held until `close` or the end of the process. Its file names the process.

    Args:
        file: the locked file.
        path: path of the file.
        made: folders that were made for the lock, the innermost first.
        is_kept: the file stays after `close`, and names no process then.
    """

    def __init__(self, file: TextIO, path: Path, made: Sequence[Path], is_kept: bool) -> None:
        self._file, self._path, self._made, self._is_kept = file, path, made, is_kept
        self._pid = os.getpid()
        _held[_identity(os.fstat(file.fileno()))] = self
        self._name(Owner.of_this_process())

    def close(self) -> None:
        """Let other processes use the folder, and remove folders that were made for nothing else. Safe to repeat."""
        if not self.is_open or os.getpid() != self._pid:  # a forked child holds no lock
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
        self._file.write(to_json(owner))
        self._file.flush()

    @property
    def is_open(self) -> bool:
        """True until `close`."""
        return not self._file.closed


_held: WeakValueDictionary[tuple[int, int], FolderLock] = WeakValueDictionary()
"""locks of this process, by device and number of the file"""


def lock_folder(folder: Path, name: str, in_use: str, is_kept: bool = False) -> FolderLock:
    """Keep other processes, and other users in this process, out of a folder.

    Args:
        folder: is made if it does not exist.
        name: name of the lock's file in it.
        in_use: message of the error.
        is_kept: keep the file after `close`.

    Returns:
        The lock.

    Raises:
        FolderInUse: the folder is locked.
        OSError: the folder cannot be written.
    """
    folder = folder.absolute()
    while True:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # the last holder has just removed the folder
            if (file := _lock(folder / name, in_use)) is not None:
                return FolderLock(file, folder / name, made, is_kept)


def _lock(path: Path, in_use: str) -> TextIO | None:
    """Return the locked file, or None if its last holder removed it meanwhile.

    Raises:
        FolderInUse: the file is locked.
    """
    path.touch()
    held = _held.get(_identity(path.stat()))
    if held is not None and held.is_open:  # before the file is opened: its close ends all locks of the process
        raise FolderInUse(in_use)
    file = path.open("a")
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
