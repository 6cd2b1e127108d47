"""One sample of an evaluation. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlite.errors import DataError

SOLVED_AT = 1.0
"""score from which a sample counts as solved, for pass@k and majority@k"""
ROUNDING = 2.0**-23
"""relative rounding error of float32, in which scores are kept"""


@dataclass(frozen=True)
class Sample:
    """One answer of the model to one item, with its score.

    Raises:
        DataError: the score is not finite.
    """

    item: str
    """name of the data item, which no other item has"""
    sample: int
    """number among the samples of the item, from 0"""
    score: float | None
    """None: the episode failed"""
    reason: str = ""
    """why the episode failed"""
    truncated: bool = False
    """a limit cut the model off"""
    answer: str | None = None
    """answer that the reward has named; None if it names none"""
    length: int = 0
    """tokens that the model wrote, in the last attempt"""
    failed_attempts: tuple[str, ...] = ()
    """kinds of the errors of the attempts that failed"""
    redrawn: str = ""
    """kind of the failure after which the model answered anew; empty if it did not"""

    def __post_init__(self) -> None:
        if self.score is not None and not math.isfinite(self.score):
            raise DataError(
                f"item {self.item}, sample {self.sample}: its score is {self.score}; expected a finite number, or None "
                "with a reason"
            )


def reaches(value: float, threshold: float) -> bool:
    """Return whether a value is at least a threshold, or equal to it up to the rounding of float32.

    Scores are kept in float32: a score of 0.7 is 0.699999988.
    """
    return value >= threshold or math.isclose(value, threshold, rel_tol=ROUNDING)
