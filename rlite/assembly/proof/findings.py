"""Contradictions that an audit finds, and what it could not check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlite.assembly.proof.comparison import Comparison
from rlite.errors import RliteError
from rlite.services.record.batches import DAMAGED


class Finding(NamedTuple):
    """One contradiction."""

    place: str
    """file and row, line, step or token"""
    problem: str
    """text of what stands there, and of what the rest implies"""


@dataclass
class Findings:
    """The result of an audit."""

    found: list[Finding] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    """numbers of things that were checked, by what was checked"""
    notes: list[str] = field(default_factory=list)
    """texts about everything that was not checked, with the reason"""

    def expect(self, holds: bool, check: str, place: str, problem: str | Callable[[], str]) -> None:
        """Count a check, and note a contradiction if it does not hold.

        Args:
            holds: whether it holds.
            check: what is checked, in words.
            place: what stands there.
            problem: what is wrong, or a function that says it.
        """
        self.checked[check] += 1
        if not holds:
            self.found.append(Finding(place, problem() if callable(problem) else problem))

    @contextmanager
    def checking(self, check: str, place: str) -> Iterator[None]:
        """Note a contradiction if something cannot be checked: a record from anyone may hold anything.

        Args:
            check: what is checked, in words.
            place: what stands there.

        Yields:
            None.
        """
        try:
            yield
        except (RliteError, *DAMAGED) as error:
            self.expect(False, check, place, f"it cannot be checked: {type(error).__name__}: {error}")

    def expect_near(self, comparison: Comparison, check: str, place: str, is_exact: bool = False) -> None:
        """Count a comparison, and note a contradiction if the two are not equal, or not near.

        Args:
            comparison: the comparison.
            check: what is checked, in words.
            place: what stands there.
            is_exact: every bit has to be equal.
        """
        holds = comparison.is_equal if is_exact else comparison.is_near
        self.expect(holds, check, place, lambda: _told(comparison))

    def note(self, text: str) -> None:
        """Note once what was not checked."""
        if text not in self.notes:
            self.notes.append(text)

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values."""
        found = [finding._asdict() for finding in self.found]
        return {"passed": not found, "found": found, "checked": dict(self.checked), "not_checked": self.notes}

    def lines(self, limit: int) -> Iterator[tuple[str, str]]:
        """Yield the first contradictions as places and texts."""
        yield from self.found[:limit]
        if len(self.found) > limit:
            yield "", f"and {len(self.found) - limit} more"


def _told(comparison: Comparison) -> str:
    if comparison.kept is not None:
        return f"{comparison.name} is {comparison.kept:.9g}, and the rest implies {comparison.again:.9g}"
    return f"{comparison.name} differs by {comparison.difference:.3g} at {comparison.where}"
