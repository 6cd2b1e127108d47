"""Files that appear whole or not at all, and files of unknown origin."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

LEADS_OUT = "a link that leads out of its folder, which is not followed"
MAX_LINE = 1 << 24
"""bytes of a line of a file that grows; a longer line comes in parts"""
MAX_GROWN = 1 << 32
"""bytes beyond which a file that grows is no longer read: it may be a hole, which costs its maker nothing"""
HEAD = 512
"""bytes at the beginning that tell one file that grows from another"""


def replace(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file beside its place, sync it to disk and rename it. A kill or a crash leaves the old file or the new.

    `path`: the file; what it held before is replaced.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)  # of a killed process; a link there may lead anywhere
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(descriptor)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def stamp(path: Path) -> tuple[int, int] | None:
    """Return when a file was changed, in nanoseconds, and its size; None if it does not exist."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path lies in a folder when its links are followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))  # resolve() refuses a loop of links


@contextmanager
def reading(path: Path, folder: Path | None = None) -> Iterator[BinaryIO]:
    """Open a regular file to read it. Another kind of file is refused at once: opening a pipe waits for its writer.

    `folder`: folder that the file must be in, when links are followed; None for any place. Yields the file's bytes.
    """
    if folder is not None and not is_inside(path, folder):
        raise OSError(errno.EXDEV, LEADS_OUT, str(path))
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
        if not S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield stream


class GrowingFile:
    """Reader of the lines that other processes append to a file.

    `path`: the file; it need not exist. A link out of its folder is not followed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rest = b""
        """line that is being written, or that a crash has cut off"""
        self.num_read = 0
        """bytes that were read"""
        self._inode, self._head = 0, b""

    def new_lines(self, begin: Callable[[], None]) -> Iterator[bytes]:
        """Yield the lines that are new. A file that was replaced is read again."""
        with reading(self.path, self.path.parent) as file:
            state, head = os.fstat(file.fileno()), file.read(HEAD)
            if state.st_size > MAX_GROWN:
                large = f"more than {MAX_GROWN >> 30} GiB, of which no new lines are read"
                raise OSError(errno.EFBIG, large, str(self.path))
            if state.st_ino != self._inode or state.st_size < self.num_read or not head.startswith(self._head):
                self.rest, self.num_read, self._inode = b"", 0, state.st_ino
                begin()
            self._head = head
            file.seek(self.num_read)
            for part in iter(lambda: file.readline(MAX_LINE), b""):
                self.num_read += len(part)
                line, self.rest = self.rest + part, b""
                if line.endswith(b"\n") or len(line) > MAX_LINE:
                    yield line
                else:
                    self.rest = line


def expect(holds: bool, problem: str) -> None:
    """Check a condition of a file's content, for readers that convert every ValueError."""
    if not holds:
        raise ValueError(problem)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk. A file renamed before that may be empty after a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_name(name: str) -> str:
    """Return a name that is also the name of files, such as that of an evaluation."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"{name!r}: expected letters, digits, _, . and -, and none of . and - first")
    return name
