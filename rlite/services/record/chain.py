"""The chain of hashes of a run: `chain.jsonl`, one link for each start, save and end.

    {"kind": "start", "step": 0, "config": SHA, "code": {...}, "data": {...}, "versions": {...}, "previous": ""}
    {"kind": "save", "step": 20, "metrics": {"bytes": 8123, "sha256": SHA}, "record": {FILE: SHA}, "checkpoints": {...}}
    {"kind": "resume", "step": 20, "from": "state/step-20", ..., "previous": SHA of the line before}
    {"kind": "end", ...}

Each link names what is new or changed since the link before; null is what was removed. `fold` is what the whole chain
says. Whoever may write the run's folder may write another chain: it proves integrity against the hash of its last link,
which a user keeps elsewhere, and no authorship.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlite import files
from rlite.errors import writing
from rlite.runtime.storage.atomic import MANIFEST
from rlite.trainer.run.folder import CHAIN

MAX_LINK = 16 << 20
"""bytes of a link that is read"""
WHOLE = 1 << 30
"""bytes up to which a file of the user is hashed whole; of a larger one, its size and its two ends"""
BLOCK = 1 << 20
FOLDED = ("record", "checkpoints", "models")
"""parts of links whose entries replace those of earlier links"""


def hash_file(path: Path) -> str | None:
    """Return the SHA-256 of a file in hexadecimal digits; None if it is no file, or is not there.

    A file of more than WHOLE bytes has "SIZE:" and the hash of its first and last WHOLE / 2 bytes.
    """
    digest = hashlib.sha256()
    try:
        size = path.stat().st_size
        with files.reading(path) as stream:
            parts = [(0, size)] if size <= WHOLE else [(0, WHOLE // 2), (size - WHOLE // 2, WHOLE // 2)]
            for start, left in parts:
                stream.seek(start)
                while left and (block := stream.read(min(BLOCK, left))):
                    digest.update(block)
                    left -= len(block)
    except (OSError, ValueError):  # a name from a file may hold a zero byte
        return None
    return digest.hexdigest() if size <= WHOLE else f"{size}:{digest.hexdigest()}"


def hash_files(paths: Iterable[tuple[str, Path]]) -> dict[str, str]:
    """Return the hashes of the files that are there, by the given names."""
    return {name: found for name, path in paths if (found := hash_file(path)) is not None}


@dataclass
class Folded:
    """Content of a chain: the files of a run and their hashes."""

    entries: dict[str, dict[str, str]] = field(default_factory=lambda: {part: {} for part in FOLDED})
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """bytes and hash of the beginning of metrics.jsonl"""
    first: Mapping[str, Any] = field(default_factory=dict)
    last: Mapping[str, Any] = field(default_factory=dict)
    last_config: str | None = None
    """hash of the config with which the run was started or resumed last"""
    last_versions: Mapping[str, Any] = field(default_factory=dict)
    """versions of packages with which the run was started or resumed last"""
    options: Any = None
    """hash of the options that decide what a step computes"""
    changed_after: int = 0
    """step after which the run was resumed with other options"""
    last_hash: str = ""
    """hash of the last line"""
    breaks: list[str] = field(default_factory=list)
    """places at which a link does not follow from the link before"""

    def add(self, link: Mapping[str, Any]) -> None:
        """Take a link."""
        changes = {part: dict(link.get(part) or {}) for part in FOLDED}
        metrics, versions = dict(link.get("metrics") or self.metrics), dict(link.get("versions") or self.last_versions)
        self.first, self.last, self.metrics, self.last_versions = self.first or link, link, metrics, versions
        self.last_config = link.get("config", self.last_config)
        if "options" in link:
            is_other = self.options not in (None, link["options"])
            self.options, self.changed_after = link["options"], int(link["step"]) if is_other else self.changed_after
        for part, own in changes.items():
            self.entries[part] |= own
            for name in [name for name, found in own.items() if found is None]:
                del self.entries[part][name]


def read_chain(folder: Path) -> Folded | None:
    """Return what the chain of a run says; None if it has none. Half a line that a killed process left is no link."""
    folded = Folded()
    try:
        with files.reading(folder / CHAIN) as stream:
            number = 0
            while line := stream.readline(MAX_LINK):
                if not line.endswith(b"\n"):
                    if len(line) == MAX_LINK:
                        folded.breaks.append(f"{CHAIN} line {number + 1}: it is too long, and nothing after it is read")
                    break
                number += 1
                _take(folded, line, number)
    except FileNotFoundError:
        return None
    return folded if number or folded.breaks else None


def _take(folded: Folded, line: bytes, number: int) -> None:
    try:
        link = json.loads(line)
        if link["previous"] != folded.last_hash:
            folded.breaks.append(f"{CHAIN} line {number}: it does not follow from the line before, which was changed")
        folded.add(link)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        folded.breaks.append(f"{CHAIN} line {number}: it cannot be read: {error}")
    folded.last_hash = hashlib.sha256(line).hexdigest()


class ChainWriter:
    """Appends links to the chain of a run.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = Folded()
        self._metrics, self._offset = hashlib.sha256(), 0

    def begin(self, step: int, checkpoint: str | None, facts: Mapping[str, Any]) -> None:
        """Append the link of a start, or of a resume.

        Args:
            step: finished steps.
            checkpoint: the checkpoint to which a resumed run returns; None for a new run.
            facts: further facts of the link.
        """
        found = read_chain(self._folder)
        self._known = found or Folded()
        if found is not None:
            self._drop_torn_line()
        kind = {"kind": "start"} if checkpoint is None else {"kind": "resume", "from": checkpoint}
        self.append({**kind, "step": step, **facts})

    def append(self, facts: Mapping[str, Any]) -> None:
        """Append a link with what is new since the last one.

        Raises:
            StorageError: it cannot be written.
        """
        now = {"record": self._record(), "checkpoints": self._checkpoints(), "models": self._models()}
        changes = {part: _changes(self._known.entries[part], found) for part, found in now.items()}
        link = {**facts, "metrics": self._hashed_metrics()} | {part: own for part, own in changes.items() if own}
        line = json.dumps({**link, "previous": self._known.last_hash}).encode() + b"\n"
        with writing(self._folder / CHAIN), (self._folder / CHAIN).open("ab") as stream:
            stream.write(line)
        self._known.add(link)
        self._known.last_hash = hashlib.sha256(line).hexdigest()

    def _record(self) -> dict[str, str]:
        """Return the hashes of the files of the record. They never change, so those that are known are not read."""
        known = self._known.entries["record"]
        paths = [(path.name, path) for path in sorted((self._folder / "record").glob("*.parquet"))]
        stamps = {name: files.stamp(path) for name, path in paths}
        unchanged = {name: known[name] for name in stamps if name in known and self._stamps.get(name) == stamps[name]}
        self._stamps = stamps
        return unchanged | hash_files((name, path) for name, path in paths if name not in unchanged)

    _stamps: Mapping[str, tuple[int, int] | None] = {}

    def _checkpoints(self) -> dict[str, str]:
        """Return the hashes of the manifests, which have those of all files of a checkpoint."""
        return hash_files(
            (path.parent.name, path) for path in sorted((self._folder / "state").glob(f"step-*/{MANIFEST}"))
        )

    def _models(self) -> dict[str, str]:
        paths = [path for name in ("latest", "best", "*_latest") for path in self._folder.glob(f"{name}/*")]
        named = [(str(path.relative_to(self._folder)), path) for path in sorted(paths) if path.suffix == ".safetensors"]
        stamps = {name: files.stamp(path) for name, path in named}
        known = self._known.entries["models"]
        unchanged = {name: known[name] for name in stamps if name in known and self._weights.get(name) == stamps[name]}
        self._weights = stamps
        return unchanged | hash_files((name, path) for name, path in named if name not in unchanged)

    _weights: Mapping[str, tuple[int, int] | None] = {}

    def _hashed_metrics(self) -> dict[str, Any]:
        try:
            with files.reading(self._folder / "metrics.jsonl") as stream:
                stream.seek(self._offset)
                while block := stream.read(BLOCK):
                    self._metrics.update(block)
                    self._offset += len(block)
        except FileNotFoundError:
            return {}
        return {"bytes": self._offset, "sha256": self._metrics.hexdigest()}

    def _drop_torn_line(self) -> None:
        path = self._folder / CHAIN
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            files.replace(path, content[: content.rfind(b"\n") + 1])


def _changes(known: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str | None]:
    changed = {name: value for name, value in found.items() if known.get(name) != value}
    return changed | dict.fromkeys(known.keys() - found.keys())


def metrics_prefix(folder: Path, num_bytes: int) -> str | None:
    """Return the hash of the first bytes of metrics.jsonl; None if it cannot be read."""
    digest, left = hashlib.sha256(), num_bytes
    try:
        with files.reading(folder / "metrics.jsonl") as stream:
            while left > 0 and (block := stream.read(min(BLOCK, left))):
                digest.update(block)
                left -= len(block)
    except OSError:
        return None
    return digest.hexdigest()
