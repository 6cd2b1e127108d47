"""Folders that exist whole or not at all: written beside their final place, sealed with hashes, then renamed."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlite.errors import CheckpointError, DamagedCheckpointError
from rlite.files import sync

MANIFEST = "manifest.json"
"""size and hash of every other file; written last"""
FACTS = "facts.json"
"""facts for readers of a checkpoint; a separate file, so that damage to it is found, too"""
PIECE_BYTES = 16 * 2**20
"""Files are hashed in pieces of this size, several at once, and a file's hash is that of its pieces' hashes. SHA-256
runs at 2 GB/s on a core that has instructions for it: a few cores outrun the disk, and nothing need be installed."""
MAX_THREADS = 16

Record = dict[str, Any]
""" "bytes" and "sha256" of one file"""


def staging(path: Path) -> Path:
    """Return a new, empty folder beside `path` to write into."""
    folder = _staging_of(path)
    discard(folder)
    folder.mkdir(parents=True)
    return folder


def is_staged(path: Path) -> bool:
    """Return whether an unpublished folder of `staging` exists."""
    return _staging_of(path).exists()


def _staging_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.writing")


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, Record]:
    """Return size and SHA-256 hash of each file, hashing several pieces in parallel."""
    sizes = {name: (folder / name).stat().st_size for name in names}
    pieces = [(name, start) for name, size in sizes.items() for start in range(0, size, PIECE_BYTES)]
    digests: dict[str, Any] = {name: hashlib.sha256() for name in sizes}
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        hashed = threads.map(lambda piece: _hash(folder / piece[0], piece[1]), pieces)
        for (name, _), digest in zip(pieces, hashed, strict=True):
            digests[name].update(digest)
    return {name: {"bytes": size, "sha256": digests[name].hexdigest()} for name, size in sizes.items()}


def seal(folder: Path, facts: Mapping[str, Any], known: Mapping[str, Record] | None = None) -> None:
    """Write the facts, then the manifest with size and hash of every file, and sync all of it to disk.

    `facts`: values for readers of the checkpoint; JSON must be able to hold them.
    """
    (folder / FACTS).write_text(json.dumps(dict(facts), indent=2))
    known = dict(known or {})
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    unknown = sorted(names - known.keys())
    for name in unknown:
        sync(folder / name)
    files = known | hash_files(folder, unknown)
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=2))
    sync(folder / MANIFEST)
    sync(folder)


def publish(folder: Path, path: Path) -> None:
    """Rename `folder` to `path`. The old content of `path` stays in place until the rename and is removed afterwards.

    A symbolic link at `path` is replaced; the link's target stays unchanged.
    """
    replaced = folder  # after an exchange it holds what `path` held
    if not os.path.lexists(path):
        folder.rename(path)
    elif not _exchange(folder, path):  # then there is a moment without either
        replaced = path.with_name(f".{path.name}.replaced")
        discard(replaced)
        path.rename(replaced)
        folder.rename(path)
    sync(path.parent)
    discard(replaced)


def discard(path: Path) -> None:
    """Delete a folder with its content, a link or a file, if it exists. Errors are ignored."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def verify(path: Path) -> dict[str, Any]:
    """Return the facts of a checkpoint after checking every file against the manifest."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    files = _read_manifest(path)
    for name, record in files.items():
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != record["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes, and had {record['bytes']}"
            raise DamagedCheckpointError(f"{path}: the file {name} {found}")
    for name, record in hash_files(path, files).items():
        if record != files[name]:
            raise DamagedCheckpointError(f"{path}: the file {name} is damaged (its hash is not the manifest's)")
    return _read(path / FACTS, lambda facts: isinstance(facts, dict))


def is_sound(path: Path) -> bool:
    """Return True if `verify` finds no damage."""
    with suppress(CheckpointError):
        verify(path)
        return True
    return False


def _read_manifest(path: Path) -> dict[str, Record]:
    if not (path / MANIFEST).is_file():
        why = "this is not a checkpoint, or it was never finished"
        raise DamagedCheckpointError(f"{path}: the file {MANIFEST} is missing: {why}")
    return _read(path / MANIFEST, _is_manifest)["files"]


def _is_manifest(table: Any) -> bool:
    return FACTS in table["files"] and all({"bytes", "sha256"} <= record.keys() for record in table["files"].values())


def _read(file: Path, is_right: Callable[[Any], bool]) -> dict[str, Any]:
    with suppress(ValueError, LookupError, AttributeError, TypeError, RecursionError):
        table = json.loads(file.read_bytes())
        if is_right(table):
            return table
    raise DamagedCheckpointError(f"{file.parent}: the file {file.name} is damaged (it cannot be read)")


def _hash(file: Path, start: int) -> bytes:
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        digest = hashlib.sha256()
        left = PIECE_BYTES
        while left and (block := stream.read(min(left, 2**20))):
            digest.update(block)
            left -= len(block)
        return digest.digest()


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically (Linux only).

    Returns False if the system cannot.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
