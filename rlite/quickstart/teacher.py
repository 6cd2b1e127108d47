"""A teacher who is often too impatient to finish: demonstrations for a warm start."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any


def impatient_demonstrations(
    problems: Sequence[Mapping[str, Any]], seed: int, *, patience: int, impatience: float
) -> list[str]:
    """One demonstrated answer for each problem, by a teacher who is often too impatient to finish.

    Answers of at most `patience` characters are demonstrated whole; of a longer one the teacher writes only so many
    characters in a share `impatience` of the cases, drawn from `seed`. A model that imitates this teacher well
    therefore fails most long problems, although it has seen how they are solved.
    """
    rng = random.Random(seed)
    hurries = [rng.random() < impatience for _ in problems]
    return [
        problem["answer"][:patience] if hurry else problem["answer"]
        for problem, hurry in zip(problems, hurries, strict=True)
    ]
