"""A set of prompts to evaluate on, and the result of its evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from rlite.errors import DataError, EvaluationInterrupted
from rlite.evaluation.metrics import summary
from rlite.evaluation.samples import SOLVED_AT, Sample
from rlite.evaluation.scores import measured
from rlite.rollout.collector.collector import RolloutCollector
from rlite.rollout.collector.ended_groups import Ended
from rlite.rollout.workflow import RolloutWorkflow


@dataclass(frozen=True)
class EvaluationSet:
    """Prompts to evaluate on, and the way in which they are answered and scored.

    Raises:
        DataError: there are no rows.
    """

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

    def __post_init__(self) -> None:
        if not len(self.rows):
            raise DataError(f"the evaluation set {self.name!r} has no rows; expected at least one")

    @property
    def num_episodes(self) -> int:
        """Episodes of one evaluation."""
        return len(self.rows) * self.samples


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation of a set."""

    set: EvaluationSet
    samples: Sequence[Sample]
    """one for each episode, in the order of the rows"""
    episodes: Sequence[Ended] = field(default=(), repr=False)
    """the episodes with their tokens, for the record; `group` is the item's index"""

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Metrics by their names without the set's; see `summary`."""
        return summary(self.samples, self.set.k, self.set.solved_at)

    @property
    def lost(self) -> Counter[str]:
        """Failed episodes by reason."""
        return Counter(sample.reason for sample in self.samples if sample.score is None)

    def without_episodes(self) -> Self:
        """Return the evaluation without its tokens, which take memory and are needed for the record alone."""
        return replace(self, episodes=())


def evaluate(
    collector: RolloutCollector, chosen: EvaluationSet, is_interrupted: Callable[[], bool] = lambda: False
) -> Evaluation:
    """Return an evaluation that is made now. The engine must not get other weights meanwhile.

    Args:
        collector: collector of the engine that serves the policy.
        chosen: the set.
        is_interrupted: becomes true when the evaluation is to end early.

    Raises:
        DataError: the tokens come from several policy versions.
        EvaluationInterrupted: the evaluation was interrupted.
    """
    episodes = collector.evaluate(chosen.rows, chosen.workflow, chosen.samples, is_interrupted=is_interrupted)
    _check_one_version(episodes, chosen.name)
    return Evaluation(chosen, samples_of(episodes), episodes)


def evaluate_each(
    collector: RolloutCollector, sets: Sequence[EvaluationSet], is_interrupted: Callable[[], bool]
) -> list[Evaluation]:
    """Return the evaluations of several sets that end before an interruption.

    Args:
        collector: collector of the engine that serves the policy.
        sets: the sets.
        is_interrupted: becomes true when the evaluations are to end early.
    """
    found: list[Evaluation] = []
    with suppress(EvaluationInterrupted):
        for each in sets:
            found.append(evaluate(collector, each, is_interrupted))
    return found


def samples_of(episodes: Sequence[Ended]) -> list[Sample]:
    """Return one sample for each episode of an evaluation.

    Its score is `scores` of the trajectory, or `rewards` if the workflow gives no scores.

    Args:
        episodes: the result of `RolloutCollector.evaluate`.

    Raises:
        DataError: `scores` or `rewards` is missing, or not [N].
    """
    return [_sample(ended) for ended in episodes]


def _sample(ended: Ended) -> Sample:
    [episode] = ended.episodes
    own: dict[str, Any] = {"item": str(ended.group), "sample": ended.first_sample}  # two rows may have the same id
    own |= {"failed_attempts": tuple(episode.failed_attempts), "redrawn": episode.redrawn}
    if ended.reason or (trajectory := episode.trajectory) is None:
        return Sample(**own, score=None, reason=ended.reason, length=ended.num_tokens.get(0, 0))
    return Sample(**own, answer=episode.answer, **measured(trajectory))


def _check_one_version(episodes: Sequence[Ended], name: str) -> None:
    rows = [episode.trajectory for ended in episodes for episode in ended.episodes if not ended.reason]
    versions = [row["versions"] for row in rows if row is not None and "versions" in row]
    made = sorted({version for own in versions for version in own[own >= 0].unique().tolist()})
    if len(made) > 1:
        raise DataError(
            f"evaluation {name}: tokens of the policy versions {made}; expected one. The engine got other weights "
            "during the evaluation, or the workflow reports versions of its own"
        )
