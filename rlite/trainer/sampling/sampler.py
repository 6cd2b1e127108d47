"""The seam of prompt samplers: an object that chooses rows and observes their rewards. No torch here.

choose(count) ──> rows ──> groups ──> rewards ──> observe(result), before the next choice
                              └── also of a group that dynamic filtering drops; not of a lost group
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlite.config import Options
from rlite.data.source import Table as Rows
from rlite.imports import find_function
from rlite.registry import Table
from rlite.trainer.callbacks import Callback

UNIFORM = "uniform"
"""name of the order without a sampler: each row once in an epoch, at random"""


@dataclass(frozen=True)
class PromptResult:
    """Rewards of the finished responses to one prompt."""

    number: int
    """number of the row in the table of training data, from 0"""
    rewards: tuple[float, ...]
    """reward of each response"""

    @property
    def mean(self) -> float:
        """Mean of the rewards."""
        return sum(self.rewards) / len(self.rewards)


class PromptSampler(Callback):
    """Chooses the rows that are asked next. A sampler is a callback: it may also watch metrics, and its state is saved.

    A run uses the sampler that `train_data.sampler.name` names, or the one among its callbacks. All methods are called
    in the thread of the run. Results are observed in the order of their groups, before the next choice, so equal runs
    draw equal prompts. A checkpoint holds `state_dict()` and the results that are not observed yet.
    """

    rows: Rows
    seed: int

    def begin(self, rows: Rows, seed: int) -> None:
        """Take the rows to choose from, before the state of a resumed run is loaded.

        Args:
            rows: rows of the training data, in rlite's form.
            seed: trainer.seed.
        """
        self.rows, self.seed = rows, seed

    @abstractmethod
    def choose(self, count: int) -> Sequence[int]:
        """Return the numbers of the next rows.

        Args:
            count: rows to return, at most as many as there are.
        """

    def observe(self, result: PromptResult) -> None:
        """Take the rewards of a prompt that was asked."""


SAMPLERS: Table[Callable[..., PromptSampler]] = Table("sampler", given=())
"""samplers by name: classes, or functions that make one. Keyword-only parameters are their options"""
_READY = "rlite.trainer.sampling.ready"


def register_sampler(name: str) -> Callable[[Any], Any]:
    """Register a class of samplers, or a function that makes one, for `train_data.sampler.name=name`.

    Args:
        name: the value of `train_data.sampler.name`.

    Returns:
        A decorator, which returns the class or function unchanged. It raises ConfigError if the name is taken.
    """
    return SAMPLERS.register(name)


class SamplerOptions(Options):
    """The choice of the prompts that are asked next."""

    name: str = UNIFORM
    """uniform: each row once in an epoch, at random; curriculum: easy rows first; intermediate: prefers rows that the
    model solves sometimes; or the name of a sampler that `--import` registers"""
    options: dict[str, Any] = {}
    """keyword parameters of the sampler: curriculum {by, start, epochs}, intermediate {low, high, floor, memory}"""

    def problems(self) -> Iterator[str]:
        """Yield a message for an unknown sampler; raise ConfigError or UnknownOptionError for options it refuses."""
        if self.name != UNIFORM and self.name not in known_samplers():
            yield f"name={self.name}: {SAMPLERS.unknown(self.name)}"
        elif self.name != UNIFORM:
            SAMPLERS.check(self.name, self.options)
        elif self.options:
            yield f"options: the sampler {UNIFORM} has none; leave them out, or choose another name"

    def make(self) -> list[PromptSampler]:
        """Return the sampler, in a list; an empty list for the uniform order."""
        return [] if self.name == UNIFORM else [known_samplers()[self.name](**self.options)]


def known_samplers() -> Mapping[str, Callable[..., PromptSampler]]:
    """Return all samplers by name, after the import of those that are ready to use."""
    find_function(f"{_READY}:IntermediateSampler", "train_data.sampler")
    return SAMPLERS
