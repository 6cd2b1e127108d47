"""Learning-rate schedules, as pure functions of the optimizer step."""

from __future__ import annotations

import math
from typing import Literal, get_args

from rlite.errors import ConfigError

Schedule = Literal["constant", "linear", "cosine", "polynomial"]


def lr_factor(
    step: int,
    schedule: Schedule,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    warmup_from: float = 0.0,
    min_factor: float = 0.0,
    power: float = 1.0,
) -> float:
    """The factor of the peak rate at optimizer step `step`, counted from 0.

    Linear warm-up in `warmup_steps` steps from `warmup_from`, which itself is no step's factor, to 1, the factor of
    step `warmup_steps` - 1. Then 1, then over the last `decay_steps` (by default all that are left) a line, half a
    cosine (arXiv:1608.03983), or the share of steps that are left to the power of `power`, down to `min_factor`, which
    step `total_steps` and all after it have. With `decay_steps` it is warmup-stable-decay (arXiv:2404.06395).

    Raises: ConfigError for an unknown schedule.
    """
    if schedule not in get_args(Schedule):
        raise ConfigError(f"schedule {schedule!r}: expected one of {', '.join(get_args(Schedule))}")
    if step < warmup_steps:
        return warmup_from + (1 - warmup_from) * (step + 1) / warmup_steps
    span = total_steps - warmup_steps if decay_steps is None else decay_steps
    done = min(max(1 - (total_steps - step) / max(span, 1), 0.0), 1.0)
    left = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "polynomial": (1 - done) ** power,
    }
    return min_factor + (1 - min_factor) * left[schedule]
