"""Gaps of a record: steps that are missing because they could not be written.

FOLDER/record/gaps.jsonl   {"first": 12, "last": 40, "reason": "the disk is full"}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlite import files
from rlite.errors import writing
from rlite.observability.record.files import FOLDER

GAPS = "gaps.jsonl"
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Gap:
    """Steps that may be missing in a record, all of them or in part."""

    first: int
    last: int | None
    """last step; None if the run has not been resumed since"""
    reason: str

    def __str__(self) -> str:
        last = "the end" if self.last is None else self.last
        return f"steps {self.first} to {last} are missing or incomplete: {self.reason}"


def read_gaps(folder: Path) -> list[Gap]:
    """Return the gaps of the record in a run's folder. Lines that cannot be read are left out."""
    try:
        with files.reading(folder / FOLDER / GAPS) as file:
            lines = file.read(MAX_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    return [gap for line in lines if (gap := _gap(line)) is not None]


def write_gaps(folder: Path, gaps: Sequence[Gap]) -> None:
    """Replace the gaps of the record in a run's folder.

    Raises:
        StorageError: the file cannot be written or deleted.
    """
    path = folder / FOLDER / GAPS
    with writing(path):
        if gaps:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(path, "".join(f"{json.dumps(asdict(gap))}\n" for gap in gaps).encode())
        else:
            path.unlink(missing_ok=True)


def resume_gaps(folder: Path, step: int) -> None:
    """End the gaps at the step from which a run is resumed. Later steps are recorded anew.

    Raises:
        StorageError: the file cannot be written or deleted.
    """
    if gaps := read_gaps(folder):
        kept = [gap for gap in gaps if gap.first <= step]
        write_gaps(folder, [replace(gap, last=step if gap.last is None else min(gap.last, step)) for gap in kept])


def _gap(line: str) -> Gap | None:
    try:
        found = json.loads(line)
        last = found["last"]
        return Gap(int(found["first"]), None if last is None else int(last), str(found["reason"]))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None
