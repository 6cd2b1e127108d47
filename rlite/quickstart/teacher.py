"""A teacher who is often too impatient to finish: demonstrations for a warm start."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any


def impatient_demonstrations(
    problems: Sequence[Mapping[str, Any]], seed: int, *, patience: int, impatience: float
) -> list[str]:
    """Demonstrate one answer per problem, as a teacher who is often too impatient to finish.

    Short answers are demonstrated whole. A model that imitates this teacher well fails most long problems, although it
    has seen how they are solved.

    Args:
        problems: rows with `answer`.
        seed: draws which long answers are cut.
        patience: characters of the longest answer that is always whole, and of a cut answer.
        impatience: share of longer answers that are cut.

    Returns:
        One answer per problem.
    """
    rng = random.Random(seed)
    answers = [problem["answer"] for problem in problems]
    return [answer[:patience] if rng.random() < impatience else answer for answer in answers]
