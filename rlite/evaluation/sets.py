"""A set of prompts to evaluate on, and the result of its evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tensordict import TensorDict

from rlite.errors import DataError
from rlite.evaluation.metrics import summary
from rlite.evaluation.samples import SOLVED_AT, Sample
from rlite.evaluation.scores import measured
from rlite.rollout.collector.collector import Collected, RolloutCollector
from rlite.rollout.collector.ended_groups import Ended
from rlite.rollout.workflow import RolloutWorkflow


@dataclass(frozen=True)
class EvaluationSet:
    """Prompts to evaluate on, and the way in which they are answered and scored."""

    name: str
    """"" for the only set of a run"""
    rows: Sequence[Mapping[str, Any]]
    """at least one"""
    workflow: RolloutWorkflow
    """makes an episode of a row, with its score"""
    samples: int = 1
    """episodes of each row"""
    k: int = 1
    """largest k of pass@k, at most `samples`"""
    solved_at: float = SOLVED_AT
    """score from which an episode counts as solved"""

    @property
    def num_episodes(self) -> int:
        """Episodes of one evaluation."""
        return len(self.rows) * self.samples


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation of a set."""

    set: EvaluationSet
    found: Collected
    """rollouts of the set; their batch has the item's index as `group_ids`"""

    @cached_property
    def samples(self) -> list[Sample]:
        """One sample for each episode, in the order of the rows."""
        return samples_of(self.found.ended)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Metrics by their names without the set's; see `summary`."""
        return summary(self.samples, self.set.k, self.set.solved_at)

    @property
    def lost(self) -> Counter[str]:
        """Failed episodes by reason."""
        return self.found.lost


def evaluate(collector: RolloutCollector, chosen: EvaluationSet) -> Evaluation:
    """Return an evaluation that is made now. The engine must not get other weights meanwhile.

    Args:
        collector: of the engine that serves the policy.
        chosen: the set.

    Raises:
        DataError: the tokens come from several policy versions.
    """
    found = collector.evaluate(chosen.rows, chosen.workflow, chosen.samples)
    if found.batch is not None:
        _check_one_version(found.batch, chosen.name)
    return Evaluation(chosen, found)


def samples_of(episodes: Sequence[Ended]) -> list[Sample]:
    """Return one sample for each episode of an evaluation.

    Its score is `scores` of the trajectory, or `rewards` if the workflow gives no scores.

    Args:
        episodes: `Collected.ended` of `RolloutCollector.evaluate`.

    Raises:
        DataError: `scores` or `rewards` is missing, or not [N].
    """
    return [_sample(ended) for ended in episodes]


def _sample(ended: Ended) -> Sample:
    [episode] = ended.episodes
    own: dict[str, Any] = {"item": str(ended.group), "sample": ended.first_sample}  # two rows may have the same id
    if ended.reason or (trajectory := episode.trajectory) is None:
        return Sample(**own, score=None, reason=ended.reason)
    return Sample(**own, answer=episode.answer, **measured(trajectory))


def _check_one_version(batch: TensorDict, name: str) -> None:
    made = batch["versions"][batch["versions"] >= 0].unique().tolist() if "versions" in batch else []
    if len(made) > 1:
        raise DataError(
            f"evaluation {name}: tokens of the policy versions {made}; expected one. The engine got other weights "
            "during the evaluation, or the workflow reports versions of its own"
        )
