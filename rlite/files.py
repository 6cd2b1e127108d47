"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


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


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk. A file renamed before that may be empty after a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
