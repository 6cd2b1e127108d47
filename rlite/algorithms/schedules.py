"""Compute coefficients that change during a run: the learning rate, and the weight of the KL to the reference."""

from __future__ import annotations

import math

from rlite.algorithms.reduce import one_of
from rlite.errors import ConfigError
from rlite.types import Schedule


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
    """Return the factor of the peak learning rate at an optimizer step.

    The factor rises linearly during the warm-up, stays 1, and falls over the last `decay_steps`.

    Args:
        step: optimizer step, counted from 0.
        schedule: shape of the decay: "constant" none, "linear" along a line, "cosine" along half a cosine
            (arXiv:1608.03983), "polynomial" as the share of steps left to the power of `power`.
        total_steps: this step and all later steps have the factor `min_factor`, except with "constant".
        warmup_steps: steps of the warm-up. Step `warmup_steps` - 1 has the factor 1.
        decay_steps: steps in which the factor falls; default: all after the warm-up. With fewer it is
            warmup-stable-decay (arXiv:2404.06395).
        warmup_from: factor at which the warm-up starts; the first step is already above it.
        min_factor: factor at which the decay ends.
        power: exponent of "polynomial".

    Raises:
        ConfigError: the schedule is unknown.
    """
    one_of(Schedule, schedule, f"schedule {schedule!r}")
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


def adaptive_kl_coef(coef: float, kl: float, *, target: float, horizon: float, num_steps: float) -> float:
    """Return the next coefficient, coef (1 + clip(kl / target - 1, -0.2, 0.2) num_steps / horizon).

    This is proportional control in log space (arXiv:1909.08593, section 2.2). It approaches the target within about 5
    horizons.

    Args:
        coef: the current coefficient.
        kl: mean KL measured with this coefficient.
        target: desired mean KL, in the same unit.
        horizon: inverse gain, in steps.
        num_steps: steps since the last update, in any unit (for example, sequences).

    Raises:
        ConfigError: target or horizon is not positive.
    """
    if target <= 0 or horizon <= 0:
        raise ConfigError(f"target={target}, horizon={horizon}: both must be positive")
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_steps / horizon)
