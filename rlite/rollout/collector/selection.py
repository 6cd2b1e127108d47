"""Failures that choose among answers. Pure: decides from counts what deserves an alarm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
    failed: Counter[int] = field(default_factory=Counter)
    """answers of episodes that have failed for good, by their number of tokens"""
    kept: Counter[int] = field(default_factory=Counter)
    """other answers, by their number of tokens"""

    def add(self, other: Selection) -> None:
        """Add the counts of another sample."""
        vars(self).update({name: count + vars(other)[name] for name, count in vars(self).items()})

    def counts(self) -> dict[str, int]:
        """Return metrics that count."""
        found: dict[str, int] = {}
        for name, kinds in (("failed_attempts", self.failed_attempts), ("redrawn", self.redrawn)):
            found |= {f"num_{name}": kinds.total(), **{f"{name}/{kind}": count for kind, count in kinds.items()}}
        return found

    def lengths(self) -> dict[str, float]:
        """Return mean lengths as metrics, if an episode has failed."""
        return {"length_failed": mean_length(self.failed), "length_kept": mean_length(self.kept)} if self.failed else {}

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
        mean, kept = mean_length(self.failed + self.kept), mean_length(self.kept)
        if self.failed.total() >= MIN_ANSWERS and self.kept and abs(mean - kept) > MAX_SHIFT * mean:
            than = "longer" if mean > kept else "shorter"
            sides = {"failed": self.failed, "others": self.kept}
            facts = {name: f"{own.total()}, mean length {mean_length(own):.4g} tokens" for name, own in sides.items()}
            yield f"answers that fail are {than} than others, and their loss changes the mean length", facts


def mean_length(lengths: Counter[int]) -> float:
    """Return the mean of lengths, each with its number of answers; 0 without an answer."""
    return sum(length * count for length, count in lengths.items()) / max(1, lengths.total())
