"""Rows of a record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rlite.services.record.files import record_files

OF_THE_CLOCK = ("ended", "events", "seconds_queue", "seconds_generate", "seconds_environment", "seconds_reward")
"""columns that differ between two runs that do the same"""


def recorded(folder: Path, source: str = "train", kind: str = "rows") -> list[dict[str, Any]]:
    """Return the rows of all steps, in order."""
    paths = [file.path for file in record_files(folder) if (file.source, file.kind) == (source, kind)]
    rows = [row for path in paths for row in pq.read_table(path).to_pylist()]
    return sorted(rows, key=lambda row: (row["step"], row["group"], row["sample"], row.get("sequence", 0)))


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without the columns of the clock."""
    return [{name: value for name, value in row.items() if name not in OF_THE_CLOCK} for row in rows]


def said(row: dict[str, Any]) -> str:
    """Return what follows the prompt."""
    return "".join(segment["text"] for segment in row["segments"][1:])
