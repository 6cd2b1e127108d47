"""Options of held-out data: `test_data.path=...` of one set, `test_data.NAME.path=...` of several. No torch here."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rlite.config import Count, Finite, Options, Share
from rlite.data.source import Source
from rlite.errors import ConfigError
from rlite.help import UNNAMED
from rlite.rollout.environments.file import WorkflowName
from rlite.rollout.rewards.options import Rewards
from rlite.trainer.options import SetSamplingOptions

KEY = "test_data"
"""group of the options"""
OF_SINGLE_SET = {"truncated": "test_truncated"}
"""logged names of metrics of a single set that training has, too"""
SOLVED_AT = 1.0
"""score from which a sample counts as solved, for pass@k and majority@k"""
ROUNDING = 2.0**-23
"""relative rounding error of float32, in which scores are kept"""
ACCURACIES = ("accuracy", "accuracy_finished")
"""metrics of every evaluation by answers"""


class HeldOutOptions(Options):
    """Rows to evaluate on."""

    path: str | None = None
    """table of the set, in the form of the training data's path; null: no evaluation"""
    columns: dict[str, str | None] | None = None
    """rlite's names of columns and the table's; default: columns of the training data"""
    map: str | None = None
    """file.py:function of a row of this table; default: map of the training data"""
    system_prompt: str | None = None
    """message of the system; default: system_prompt of the training data"""
    limit: Count | None = None
    """rows to evaluate on, from the beginning of the table; default: all"""
    every: Count | None = None
    """steps between two evaluations; default: trainer.test_freq"""

    @property
    def is_generated(self) -> bool:
        """True if the set is evaluated by answers that the model generates, and not by the loss of its rows."""
        return False


def held_out_sources(
    sets: Mapping[str, HeldOutOptions],
    columns: Mapping[str, str | None],
    system_prompt: str | None,
    map: str | None = None,
) -> dict[str, Source]:
    """Return the tables to evaluate on by the names of their sets.

    `sets`: options of the sets; a single set without a path evaluates nothing.
    """
    if missing := [name for name, options in sets.items() if options.path is None and name != UNNAMED]:
        close = difflib.get_close_matches(missing[0], sets.keys() - missing, n=1)
        hint = f"; did you mean {key_of(close[0])!r}?" if close else ""
        raise ConfigError(f"required and not set: {key_of(missing[0])}.path{hint}")
    return {
        name: Source(
            path=options.path,
            key=key_of(name),
            columns=columns if options.columns is None else options.columns,
            map=map if options.map is None else options.map,
            system_prompt=system_prompt if options.system_prompt is None else options.system_prompt,
        )
        for name, options in sets.items()
        if options.path is not None
    }


def key_of(name: str) -> str:
    """Return the group of options of a set."""
    return f"{KEY}.{name}" if name else KEY


def prefixed(name: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a set under the names that are logged: NAME/METRIC, or METRIC for a single set."""
    return {metric_of(name, metric): value for metric, value in metrics.items()}


def metric_of(name: str, metric: str) -> str:
    """Return the logged name of a set's metric."""
    return f"{name}/{metric}" if name else OF_SINGLE_SET.get(metric, metric)


def metrics_of(names: Iterable[str], metrics: Sequence[str]) -> list[str]:
    """Return the logged names of the same metrics of several sets."""
    return [metric_of(name, metric) for name in names for metric in metrics]


def without_sets(names: Iterable[str], metrics: Mapping[str, float]) -> dict[str, float]:
    """Return logged metrics without those of some named sets."""
    prefixes = tuple(f"{name}/" for name in names)
    return {key: value for key, value in metrics.items() if not key.startswith(prefixes)}


class GeneratedOptions(HeldOutOptions):
    """Rows to evaluate on, by answers that the model generates if there is a reward or a workflow."""

    samples: Count = 1
    """responses to each prompt; more than one need a temperature above 0"""
    k: Count | None = None
    """largest k of the metrics pass@k; default: samples"""
    solved_at: Finite = SOLVED_AT
    """score from which a response counts as solved, for pass@k and majority@k"""
    max_error_share: Share = 0.1
    """share of episodes that may fail in an evaluation; with more it is invalid, and chooses no best model"""
    sampling: SetSamplingOptions = SetSamplingOptions()
    """sampling of the set"""
    reward: Rewards = {}
    """rewards of the set, as reward.* of the run; default: the source of rewards of the run"""
    workflow: WorkflowName | None = None
    """name of a registered workflow for the set; default: the source of rewards of the run"""

    @property
    def is_generated(self) -> bool:
        """True if the set has a source of rewards of its own."""
        return bool(self.reward) or self.workflow is not None

    def problems(self) -> Iterator[str]:
        """Yield a message for each rule of samples and of sources of rewards that does not hold."""
        yield from problems_of_k(self.k, self.samples)
        if self.workflow is not None and self.reward:
            yield "workflow: reward and workflow are given; expected one source of rewards"


def problems_of_k(k: int | None, samples: int) -> Iterator[str]:
    """Yield a message if there are too few samples of each prompt for pass@k.

    `k`: largest k; None is `samples`.
    """
    if k is not None and k > samples:
        yield f"k={k}: pass@{k} needs {k} samples of each prompt, and samples={samples}; raise samples, or lower k"


class HeldOutPromptOptions(GeneratedOptions):
    """Prompts to evaluate on."""

    first: bool = True
    """evaluate before the first step, too"""


def reaches(value: float, threshold: float) -> bool:
    """Return whether a value is at least a threshold, or equal to it up to the rounding of float32.

    Scores are kept in float32: a score of 0.7 is 0.699999988.
    """
    return value >= threshold or math.isclose(value, threshold, rel_tol=ROUNDING)
