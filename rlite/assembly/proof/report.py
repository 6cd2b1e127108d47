"""The result of a replay or of an audit: comparisons, contradictions, and everything that could not be checked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rlite import files
from rlite.assembly.proof.comparison import Comparison, compare_numbers, worst_of
from rlite.errors import RliteError, writing
from rlite.services.record.batches import DAMAGED

REPLAYED = "quantities of steps made again"


class Finding(NamedTuple):
    """One contradiction."""

    place: str
    """file and row, line, step or token"""
    problem: str
    """text of what stands there, and of what the rest implies"""


@dataclass
class Report:
    """The result of a replay or of an audit."""

    start: str = ""
    """checkpoint or model that a replay began from"""
    steps: dict[int, list[Comparison]] = field(default_factory=dict)
    """comparisons of the steps that were made again"""
    found: list[Finding] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    """numbers of things that were checked, by what was checked"""
    notes: list[str] = field(default_factory=list)
    """texts about everything that was not checked, with the reason"""
    is_exact: bool = False
    """every bit of a step that is made again has to be equal"""

    def expect(self, holds: bool, check: str, place: str, problem: str) -> None:
        """Count a check, and note a contradiction if it does not hold."""
        self.checked[check] += 1
        if not holds:
            self.found.append(Finding(place, problem))

    @contextmanager
    def checking(self, check: str, place: str) -> Iterator[None]:
        """Note a contradiction if something cannot be checked: a record from anyone may hold anything."""
        try:
            yield
        except (RliteError, *DAMAGED) as error:
            self.expect(False, check, place, f"it cannot be checked: {type(error).__name__}: {error}")

    def compare(self, comparison: Comparison, check: str, place: str, is_exact: bool = False) -> None:
        """Count a comparison, and note a contradiction if the two are not equal, or not near."""
        holds = comparison.is_equal if is_exact else comparison.is_near
        self.expect(holds, check, place, f"{comparison.name}: {comparison}")

    def compare_numbers(self, kept: Mapping[str, float], again: Mapping[str, float], check: str, place: str) -> None:
        """Compare the numbers that were computed again with those of the same names that the run has kept."""
        for name in [name for name in again if name in kept]:
            self.compare(compare_numbers(name, kept[name], again[name]), check, place)

    def replayed(self, step: int, place: str, comparisons: Iterable[Comparison]) -> None:
        """Take quantities of a step that was made again."""
        for each in comparisons:
            self.steps.setdefault(step, []).append(each)
            self.compare(each, REPLAYED, place, self.is_exact)

    def verdict(self, step: int) -> str:
        """Return the worst verdict of a step that was made again."""
        return worst_of(self.steps[step]).verdict

    def note(self, text: str) -> None:
        """Note once what was not checked."""
        if text not in self.notes:
            self.notes.append(text)

    def write(self, *paths: Path) -> None:
        """Write the result as JSON."""
        steps = [
            {"step": step, "verdict": self.verdict(step), "comparisons": [asdict(each) for each in own]}
            for step, own in self.steps.items()
        ]
        found = [finding._asdict() for finding in self.found]
        result: dict[str, Any] = {"passed": not found, "found": found, "checked": dict(self.checked)}
        result |= {"not_checked": self.notes, "start": self.start, "steps": steps}
        for path in paths:
            with writing(path):
                files.replace(path, json.dumps(result, indent=2).encode())
