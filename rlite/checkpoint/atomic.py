"""Folders that are there whole or not at all: written beside their place, sealed with hashes, renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from rlite.errors import CheckpointError

MANIFEST = "manifest.json"


def staging(path: Path) -> Path:
    """An empty folder beside `path` to write into."""
    folder = path.with_name(f".{path.name}.writing")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def seal(folder: Path, **facts: object) -> None:
    """Write the manifest: a hash of every file, and some facts that a reader wants to check."""
    files = {str(file.relative_to(folder)): _hash(file) for file in sorted(folder.rglob("*")) if file.is_file()}
    (folder / MANIFEST).write_text(json.dumps({"files": files, **facts}, indent=2))


def publish(folder: Path, path: Path) -> None:
    """Rename `folder` to `path`; what was there before is there until then, and is removed after."""
    old = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    folder.rename(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    shutil.rmtree(old, ignore_errors=True)


def verify(path: Path) -> dict:
    """The manifest's facts. Raises CheckpointError that names what is missing or damaged."""
    if not (path / MANIFEST).exists():
        raise CheckpointError(f"{path}: no {MANIFEST} in it: this is not a checkpoint, or it was never finished")
    manifest = json.loads((path / MANIFEST).read_text())
    for name, expected in manifest["files"].items():
        if not (path / name).exists():
            raise CheckpointError(f"{path}: the file {name} is missing")
        if _hash(path / name) != expected:
            raise CheckpointError(f"{path}: the file {name} is damaged (its hash is not the manifest's)")
    return manifest


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
