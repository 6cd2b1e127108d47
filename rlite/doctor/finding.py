"""The result of one check."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """The result of a check."""

    topic: str
    text: str
    level: Literal["ok", "note", "FAILED"] = "ok"

    def __str__(self) -> str:
        """Return one readable line."""
        return f"{self.level:<6}  {self.topic:<18}  {self.text}"
