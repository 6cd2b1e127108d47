"""Samplers that are ready to use: a curriculum, and rows of intermediate success. No torch here."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from rlite.errors import ConfigError, DataError, did_you_mean
from rlite.imports import find_function
from rlite.rollout.rewards.score import as_number
from rlite.trainer.sampling.sampler import PromptResult, PromptSampler, Rows, register_sampler


class WeightedSampler(PromptSampler):
    """Base of samplers that draw at random by a weight of each row, no row twice in one choice.

    The first of `count` rows is drawn in proportion to the weights, each further one in proportion to those that are
    left (Efraimidis and Spirakis, 2006: the rows with the largest log w + Gumbel noise). The noise depends only on seed
    and number of the draw.
    """

    num_draws = 0
    """calls of `choose`"""
    num_drawn = 0
    """rows that were chosen"""

    @abstractmethod
    def weights(self, count: int) -> np.ndarray:
        """Return the weight of each row [N], of which at least `count` are above 0."""

    def choose(self, count: int) -> list[int]:
        """Return `count` different rows."""
        noise = np.random.default_rng([self.seed, self.num_draws]).gumbel(size=len(self.rows))
        with np.errstate(divide="ignore"):
            keys = np.log(self.weights(count)) + noise
        self.num_draws, self.num_drawn = self.num_draws + 1, self.num_drawn + count
        return np.argsort(-keys, kind="stable")[:count].tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of draws."""
        return {"num_draws": self.num_draws, "num_drawn": self.num_drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the draws of an earlier run."""
        self.num_draws, self.num_drawn = state["num_draws"], state["num_drawn"]


@register_sampler("curriculum")
class CurriculumSampler(WeightedSampler):
    """Easy rows first: draws among the easiest share of the rows, which grows until it holds all.

    Args:
        by: a column of numbers, or file.py:function of a row that returns a number. The least is the easiest.
        start: share of the rows at the beginning.
        epochs: the share grows evenly until so many times the number of rows was asked.
    """

    def __init__(self, *, by: str = "difficulty", start: float = 0.2, epochs: float = 1.0) -> None:
        if not (0 < start <= 1 and epochs > 0):
            raise ConfigError(f"sampler curriculum: start={start}, epochs={epochs}; expected a share, and more than 0")
        self.by, self.start, self.epochs = by, start, epochs

    def begin(self, rows: Rows, seed: int) -> None:
        """Rank the rows by difficulty; rows of equal difficulty keep their order.

        Raises:
            ConfigError: there is no such column or function.
            DataError: a row's difficulty is no finite number.
        """
        super().begin(rows, seed)
        what = f"train_data.sampler.options.by={self.by}"
        if ":" not in self.by and self.by not in rows[0]:
            raise ConfigError(f"{what}: there is no such column; {did_you_mean(self.by, map(str, rows[0]))}")
        rate = find_function(self.by, what) if ":" in self.by else lambda row: row.get(self.by)
        difficulties = [as_number(rate(row)) for row in rows]
        if None in difficulties:
            number = difficulties.index(None)
            raise DataError(f"{what}: {rate(rows[number])!r:.200} for row index {number}; expected a finite number")
        order = np.argsort(np.array(difficulties, dtype=float), kind="stable")
        self._ranks = np.argsort(order)

    def weights(self, count: int) -> np.ndarray:
        """Return 1 for the rows of the easiest share, 0 for others."""
        grown = self.start + (1 - self.start) * self.num_drawn / (self.epochs * len(self.rows))
        return (self._ranks < max(count, grown * len(self.rows))).astype(float)


@register_sampler("intermediate")
class IntermediateSampler(WeightedSampler):
    """Prefers rows that the model solves sometimes: only their groups have rewards that differ.

    The weight of a row is 4 p (1 - p) + floor, where p is the row's mean reward between `low` and `high`. A row that
    was not asked yet has the weight 1. p is a moving average over the times that the row was asked.

    Args:
        low: reward of a failure.
        high: reward of a success.
        floor: weight of a row that the model always or never solves, so that it is asked again at times.
        memory: share of the earlier average in a new one.
    """

    def __init__(self, *, low: float = 0.0, high: float = 1.0, floor: float = 0.05, memory: float = 0.5) -> None:
        if not (low < high and floor > 0 and 0 <= memory < 1):
            found = f"low={low}, high={high}, floor={floor}, memory={memory}"
            raise ConfigError(f"sampler intermediate: {found}; expected low < high, floor > 0 and 0 <= memory < 1")
        self.low, self.high, self.floor, self.memory = low, high, floor, memory
        self.success: dict[int, float] = {}
        """moving average of each row's success, in [0, 1]; rows that were not asked have none"""

    def observe(self, result: PromptResult) -> None:
        """Move the average of a row's success towards its mean reward."""
        own = min(max((result.mean - self.low) / (self.high - self.low), 0.0), 1.0)
        before = self.success.get(result.number, own)
        self.success[result.number] = self.memory * before + (1 - self.memory) * own

    def weights(self, count: int) -> np.ndarray:
        """Return the weight of each row, which is above 0."""
        weights = np.ones(len(self.rows))
        success = np.fromiter(self.success.values(), float, len(self.success))
        weights[np.fromiter(self.success, int, len(self.success))] = 4 * success * (1 - success) + self.floor
        return weights

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of draws, and the success of each row that was asked."""
        return {**super().state_dict(), "success": [[number, value] for number, value in self.success.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the averages of an earlier run."""
        super().load_state_dict(state)
        self.success = {int(number): value for number, value in state["success"]}
