"""The chain of hashes of a run: `chain.jsonl`, one link for each start, save and end.

    {"kind": "start", "step": 0, "options": {...}, "config": SHA, "code": {...}, "versions": {...}, "previous": "", ...}
    {"kind": "save", "step": 20, "metrics": {"bytes": 8123, "sha256": SHA}, "record": {FILE: SHA}, "checkpoints": {...}}
    {"kind": "resume", "step": 20, "from": "state/step-20", ..., "previous": SHA of the line before}
    {"kind": "end", ...}

Each link names what is new or changed since the link before; null is what was removed. A resume names under `changed`
the files that somebody has changed while the run was stopped. `Folded` is what the whole chain says. Whoever may write
the run's folder may write another chain: it proves integrity against the hash of its last link, which a user keeps
elsewhere, and no authorship.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rlite import files
from rlite.errors import writing
from rlite.runtime.storage.atomic import MANIFEST
from rlite.services.record.files import TRAIN, file_of
from rlite.services.record.writer import has_texts
from rlite.trainer.run.folder import CHAIN

MAX_LINK, MAX_CHAIN = 16 << 20, 1 << 28
"""bytes of a link, and of a chain, that are read"""
WHOLE = 1 << 30
"""bytes up to which a file of the user is hashed whole; of a larger one, its size and its two ends"""
BLOCK = 1 << 20
METRICS = "metrics.jsonl"
BEGINS, END = ("start", "resume"), "end"
"""kinds of links"""


class Part(NamedTuple):
    """Files of one kind, which links name. The path of a name in the run's folder is BEFORE + name + AFTER."""

    before: str
    after: str
    patterns: tuple[str, ...]
    """patterns of names"""

    def path(self, name: str) -> str:
        """Return the path of a name in the run's folder."""
        return f"{self.before}{name}{self.after}"

    def names(self, folder: Path) -> list[str]:
        """Return the names of the files that are there."""
        paths = [path for pattern in self.patterns for path in folder.glob(self.path(pattern))]
        found = sorted(path.relative_to(folder).as_posix() for path in paths)
        return [path.removeprefix(self.before).removesuffix(self.after) for path in found]


PARTS = {
    "record": Part("record/", "", ("*.parquet",)),
    "checkpoints": Part("state/", f"/{MANIFEST}", ("step-*",)),
    "models": Part("", "", ("latest/*.safetensors", "best/*.safetensors", "*_latest/*.safetensors")),
}
"""files whose entries replace those of earlier links; a manifest has the hashes of all files of a checkpoint"""


def hash_file(path: Path, first: int | None = None) -> str | None:
    """Return the SHA-256 of a file in hexadecimal digits; None if it is no file, or is not there.

    A file of more than WHOLE bytes has "SIZE:" and the hash of its first and last WHOLE / 2 bytes.

    `first`: number of bytes from the beginning that are hashed, all of them; None for the file.
    """
    digest = hashlib.sha256()
    try:
        size = path.stat().st_size if first is None else first
        is_whole = size <= WHOLE or first is not None
        with files.reading(path) as stream:
            for start, left in [(0, size)] if is_whole else [(0, WHOLE // 2), (size - WHOLE // 2, WHOLE // 2)]:
                stream.seek(start)
                while left > 0 and (block := stream.read(min(BLOCK, left))):
                    digest.update(block)
                    left -= len(block)
    except (OSError, ValueError):  # a name from a file may hold a zero byte
        return None
    return digest.hexdigest() if is_whole else f"{size}:{digest.hexdigest()}"


def hash_files(paths: Iterable[tuple[str, Path]]) -> dict[str, str]:
    """Return the hashes of the files that are there, by the given names."""
    return {name: found for name, path in paths if (found := hash_file(path)) is not None}


@dataclass
class Folded:
    """Content of a chain: the files of a run and their hashes."""

    entries: dict[str, dict[str, str]] = field(default_factory=lambda: {part: {} for part in PARTS})
    """hashes of files by part and name"""
    metrics: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    """steps of links, with bytes and hash of the beginning of metrics.jsonl"""
    begins: list[Mapping[str, Any]] = field(default_factory=list)
    """the links of the start and of each resume"""
    last: Mapping[str, Any] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    """files that were changed while the run was stopped, with the step from which it was resumed"""
    last_hash: str = ""
    """hash of the last line"""
    breaks: list[str] = field(default_factory=list)
    """places at which a link does not follow from the link before"""

    @property
    def is_empty(self) -> bool:
        """True if the run has no chain."""
        return not (self.last_hash or self.breaks)

    @property
    def has_ended(self) -> bool:
        """True if the run has ended by itself, and was not killed."""
        return self.last.get("kind") == END

    def add(self, link: Mapping[str, Any]) -> None:
        """Take a link."""
        changes, step = {part: dict(link.get(part) or {}) for part in PARTS}, link.get("step", 0)
        if type(step) is not int or any("\0" in name for own in changes.values() for name in own):
            raise ValueError(f"step {step!r}, or a name that no file has")
        self.changed |= dict.fromkeys(link.get("changed") or (), step)
        self.metrics += [(step, dict(link["metrics"]))] if link.get("metrics") else []
        self.last = link
        self.begins += [link] if link.get("kind") in BEGINS else []
        for part, own in changes.items():
            joined = self.entries[part] | own
            self.entries[part] = {name: value for name, value in joined.items() if value is not None}

    def files(self) -> Iterator[tuple[str, str, str]]:
        """Yield part, path in the run's folder, and hash of each file."""
        for part, own in self.entries.items():
            yield from ((part, PARTS[part].path(name), value) for name, value in own.items())

    def fault_of_metrics(self, folder: Path, step: float = math.inf) -> str:
        """Return why metrics.jsonl is not what the run has written; "" if it is."""
        if not (known := [own for after, own in self.metrics if after <= step]):
            return ""
        count = known[-1].get("bytes")
        if not isinstance(count, int) or hash_file(folder / METRICS, first=count) != known[-1].get("sha256"):
            return "a line was changed, added or removed: its hash is not the chain's"
        is_whole = self.has_ended and self.last.get("step", 0) <= step
        is_longer = is_whole and (files.stamp(folder / METRICS) or (0, 0))[1] > count
        return "lines were added after the end of the run" if is_longer else ""


def read_chain(folder: Path) -> Folded:
    """Return what the chain of a run says, if it has one. Half a line that a killed process left is no link."""
    folded = Folded()
    with suppress(FileNotFoundError), files.reading(folder / CHAIN) as stream:
        number = 0
        while line := stream.readline(MAX_LINK):
            if not line.endswith(b"\n") or stream.tell() > MAX_CHAIN:
                if len(line) == MAX_LINK or stream.tell() > MAX_CHAIN:
                    folded.breaks.append(f"{CHAIN} line {number + 1}: it is too long, and nothing after it is read")
                break
            number += 1
            _take(folded, line, number)
    return folded


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

    It is made before a resumed run changes anything: it compares the files that the chain lists.

    `step`: finished steps of a run that goes on: what was written later may have been removed by an attempt to go on
    that failed. None: what the folder holds is deleted before the first link.
    """

    def __init__(self, folder: Path, step: int | None) -> None:
        self._folder = folder
        self._hashes: dict[str, tuple[tuple[int, int] | None, str | None]] = {}
        """time of change, size, and hash of files; a file is read again if it was changed"""
        self._known = Folded() if step is None else read_chain(folder)
        self._metrics, self._offset = hashlib.sha256(), 0
        self.changed = {
            path: now
            for part, path, value in self._known.files()
            if (now := self._hash(path)) != value and not self._may_be_own(part, folder / path, now, step or 0)
        }
        """files that were changed while the run was stopped, with their hashes now"""
        if self._known.fault_of_metrics(folder, step or 0):
            self.changed[METRICS] = self._hash(METRICS)

    def _may_be_own(self, part: str, path: Path, now: str | None, step: int) -> bool:
        """Return whether the run itself may have changed a file after its last link.

        An attempt to go on after a step drops the record of later steps. A run that was killed has also removed and
        merged files, exported weights, saved later steps, evaluated the last step again, and cut the texts out of a
        record at its limit.
        """
        if part == "record":
            file = file_of(path)
            if file is None or file.last > step or self._known.has_ended:
                return file is not None and file.last > step
            is_evaluated_again = file.source != TRAIN and file.last == step
            return now is None or is_evaluated_again or (file.kind == "rows" and not has_texts(path))
        is_later = part == "checkpoints" and any(
            int(own) > step for own in re.findall(r"^step-(\d+)", path.parent.name)
        )
        return not self._known.has_ended and (now is None or part == "models" or is_later)

    def begin(self, step: int, checkpoint: str | None, facts: Mapping[str, Any]) -> None:
        """Append the link of a start, or of a resume.

        `checkpoint`: the checkpoint to which a resumed run returns; None for a new run.
        """
        self._drop_torn_line()
        kind = {"kind": "start"} if checkpoint is None else {"kind": "resume", "from": checkpoint}
        self.append({**kind, "step": step, **facts} | ({"changed": self.changed} if self.changed else {}))

    def append(self, facts: Mapping[str, Any]) -> None:
        """Append a link with what is new since the last one."""
        link = {**facts, "metrics": self._hashed_metrics()}
        for name, part in PARTS.items():
            known = self._known.entries[name]
            now = {own: self._hash(part.path(own)) for own in part.names(self._folder)}
            changes = {own: value for own, value in now.items() if known.get(own) != value}
            if changes := changes | dict.fromkeys(known.keys() - now.keys()):
                link[name] = changes
        line = json.dumps({**link, "previous": self._known.last_hash}).encode() + b"\n"
        with writing(self._folder / CHAIN), (self._folder / CHAIN).open("ab") as stream:
            stream.write(line)
        self._known.add(link)
        self._known.last_hash = hashlib.sha256(line).hexdigest()

    def _hash(self, path: str) -> str | None:
        stamp = files.stamp(self._folder / path)
        if path not in self._hashes or self._hashes[path][0] != stamp:
            self._hashes[path] = stamp, hash_file(self._folder / path)
        return self._hashes[path][1]

    def _hashed_metrics(self) -> dict[str, Any]:
        try:
            with files.reading(self._folder / METRICS) as stream:
                stream.seek(self._offset)
                while block := stream.read(BLOCK):
                    self._metrics.update(block)
                    self._offset += len(block)
        except FileNotFoundError:
            return {}
        return {"bytes": self._offset, "sha256": self._metrics.hexdigest()}

    def _drop_torn_line(self) -> None:
        path = self._folder / CHAIN
        content = path.read_bytes() if path.exists() else b"\n"
        if not content.endswith(b"\n"):
            files.replace(path, content[: content.rfind(b"\n") + 1])
