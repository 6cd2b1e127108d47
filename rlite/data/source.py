"""A table that a run reads. No torch here, so that options name tables at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Table = Sequence[Mapping[str, Any]]
"""rows of a table"""


class Source(NamedTuple):
    """A table that a run reads."""

    path: str
    """path in the form of `read_rows`"""
    key: str = "data"
    """group of options that names the table"""
    columns: Mapping[str, str | None] = {}
    """rlite's names of columns -> the table's names; None hides a column"""
    map: str | None = None
    """file.py:function of a row as the table has it, which returns the row to read"""
    system_prompt: str | None = None
    """begins conversations that have no system message"""
    rows: Iterable[Mapping[str, Any]] | None = None
    """rows of a program, in place of those of the path"""

    @property
    def where(self) -> str:
        """The table's name in messages."""
        return f"{self.key}.path={self.path}"
