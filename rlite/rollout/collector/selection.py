"""Failures that choose among answers. Pure: decides from counts what deserves an alarm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MAX_FAILED = 0.1
"""share of the attempts at an episode that may fail without an alarm"""
MAX_REDRAWN = 0.05
"""share of the groups that may have other answers than those drawn first"""
MAX_SHIFT = 0.02
"""relative change of the mean length, by missing answers, that is no alarm"""
MIN_ANSWERS = 2
"""failed answers from which their lengths are compared"""


@dataclass
class Selection:
    """Effect of failures on a sample of answers."""

    num_groups: int = 0
    num_attempts: int = 0
    """attempts at an episode"""
    failed_attempts: Counter[str] = field(default_factory=Counter)
    """attempts that failed, by kind of the failure"""
    redrawn: Counter[str] = field(default_factory=Counter)
    """groups with other answers than those drawn first, by kind of the failure"""
    failed: list[int] = field(default_factory=list)
    """tokens of the answer of each episode that has failed for good"""
    kept: list[int] = field(default_factory=list)
    """tokens of each other answer"""

    def add(self, other: Selection) -> None:
        """Add the counts of another sample."""
        self.num_groups += other.num_groups
        self.num_attempts += other.num_attempts
        self.failed_attempts += other.failed_attempts
        self.redrawn += other.redrawn
        self.failed, self.kept = self.failed + other.failed, self.kept + other.kept

    def counts(self) -> dict[str, int]:
        """Return metrics that count."""
        kinds = {"failed_attempts": self.failed_attempts, "redrawn": self.redrawn}
        totals = {f"num_{name}": own.total() for name, own in kinds.items()}
        return totals | {f"{name}/{kind}": count for name, own in kinds.items() for kind, count in own.items()}

    def lengths(self) -> dict[str, float]:
        """Return mean lengths as metrics, if an episode has failed."""
        return {"length_failed": _mean(self.failed), "length_kept": _mean(self.kept)} if self.failed else {}

    def alarms(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield a cause, without numbers, and the facts of each alarm."""
        again = "after failures, answers were drawn again, which favours answers that do not fail"
        for cause, kinds, num, limit in (
            ("many attempts at an episode fail", self.failed_attempts, self.num_attempts, MAX_FAILED),
            (again, self.redrawn, self.num_groups, MAX_REDRAWN),
        ):
            if kinds.total() > limit * num:
                counts = {kind: f"{count} x" for kind, count in kinds.most_common()}
                yield cause, {"share": f"{kinds.total()} of {num} (limit {limit:.0%})", **counts}
        mean, kept = _mean([*self.failed, *self.kept]), _mean(self.kept)
        if len(self.failed) >= MIN_ANSWERS and self.kept and abs(mean - kept) > MAX_SHIFT * mean:
            than = "longer" if mean > kept else "shorter"
            facts = {"failed": f"{len(self.failed)}, mean length {_mean(self.failed):.4g} tokens"}
            facts["others"] = f"{len(self.kept)}, mean length {kept:.4g} tokens"
            yield f"answers that fail are {than} than others, and their loss changes the mean length", facts


def _mean(lengths: Sequence[int]) -> float:
    return sum(lengths) / max(1, len(lengths))
