"""The coefficients of a step: options, their schedules, the adapted weight of the KL, and what callbacks have set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlite.algorithms import adaptive_kl_coef
from rlite.errors import ConfigError
from rlite.trainer.rl.options import PpoConfig, ScheduleOptions

SET = "set/"
"""beginning of the names of metrics for coefficients that a callback has set"""


class Coefficients:
    """The coefficients that change during a run.

    A coefficient is what a callback has set, else what the measured KL has made of it, else the value of its schedule,
    else its option. Schedules depend on the step alone.
    """

    def __init__(self, options: PpoConfig) -> None:
        self._options, self._adapted = options, options.kl.coef
        self._is_adaptive = options.kl.adaptive_target is not None and options.kl.type is not None
        self.chosen: dict[str, float] = {}
        """coefficients that a callback has set"""
        self.kl: float | None = None
        """weight of the KL in rewards and advantages of the step, if it is not that of the options"""
        self.may_differ = self._is_adaptive or any(points for _, points in options.schedule)
        """a coefficient may not be that of the options"""

    def at(self, step: int) -> dict[str, float]:
        """Return the coefficients of a step that may differ from their options, by name."""
        adapted = {"kl_coef": self._adapted} if self._is_adaptive else {}
        schedules = {name: dict(sorted(points.items())) for name, points in self._options.schedule if points}
        scheduled = {name: float(np.interp(step, [*own], [*own.values()])) for name, own in schedules.items()}
        return {**scheduled, **adapted, **self.chosen}

    def choose(self, values: Mapping[str, float]) -> None:
        """Set coefficients from the next step on."""
        chosen = {name: float(value) for name, value in values.items()}
        ScheduleOptions(**{name: {1: value} for name, value in chosen.items()})  # raises unless they are valid
        for name, why in self._options.fixed_coefficients().items():
            if name in chosen:
                raise ConfigError(f"{name}={chosen[name]}: {why}")
        self.chosen, self.may_differ = self.chosen | chosen, True

    def end_step(self, step: int, kl: float | None, num_sequences: int) -> dict[str, float]:
        """Return the coefficients that a step had as metrics, then adapt the weight of the KL if it has a target.

        `kl`: mean KL of a token in this step; None if the step measured none.
        """
        used, target = self.at(step), self._options.kl.adaptive_target
        if self._is_adaptive and target is not None and kl is not None:
            given = {"target": target, "horizon": self._options.kl.adaptive_horizon, "num_steps": num_sequences}
            self._adapted = adaptive_kl_coef(self._adapted, kl, **given)
        return used | {f"{SET}{name}": value for name, value in self.chosen.items()}

    def take(self, line: Mapping[str, float]) -> None:
        """Take what callbacks had set in a step from its metrics."""
        self.chosen = {name: line[f"{SET}{name}"] for name in ScheduleOptions.model_fields if f"{SET}{name}" in line}
        self.may_differ |= bool(self.chosen)

    def state_dict(self) -> dict[str, Any]:
        """Return the adapted weight and what callbacks have set, to resume from."""
        return {"coef": self._adapted, "set": self.chosen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Without a target the weight of the KL is this run's option."""
        self._adapted = state.get("coef", self._adapted)
        self.chosen = dict(state.get("set", {}))
        self.may_differ |= bool(self.chosen)


def coefficients_at(options: PpoConfig, step: int, line: Mapping[str, float]) -> dict[str, float]:
    """Return the coefficients of a finished step that may differ from its options.

    `line`: metrics of the step, whose values count; {} if they were not logged.
    """
    coefficients = Coefficients(options)
    coefficients.take(line)
    found = coefficients.at(step)
    return {**found, **{name: line[name] for name in found if name in line}}
