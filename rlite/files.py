"""Files that appear whole or not at all, and files of unknown origin."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO


def replace(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file beside its place, sync it to disk and rename it. A kill or a crash leaves the old file or the new.

    Args:
        path: the file; what it held before is replaced.
        content: its new content.
        mode: permissions, restricted further by the umask.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
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


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read it. Another kind of file is refused at once: opening a pipe waits for its writer.

    Yields:
        The file's bytes.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: the path names no regular file, or cannot be read.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
        if not S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield stream


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk. A file renamed before that may be empty after a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
