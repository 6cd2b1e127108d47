"""A set of prompts to evaluate on, and what an evaluation of it has found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict

from rlite.batch import check_one_per_row
from rlite.errors import DataError
from rlite.evaluation.metrics import summary
from rlite.evaluation.samples import SOLVED_AT, Sample
from rlite.rollout.collector.collector import Collected, RolloutCollector
from rlite.rollout.trajectories import first_rows, trajectory_index
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
    """its batch has the item's index as `group_ids`"""

    @cached_property
    def samples(self) -> list[Sample]:
        """One sample for each episode, in the order of the rows."""
        return samples_of(self.found, self.set.rows, self.set.samples)

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


def samples_of(found: Collected, rows: Sequence[Mapping[str, Any]], num_samples: int) -> list[Sample]:
    """Return one sample for each episode of an evaluation.

    Its score is `scores` of the trajectory, or `rewards` if the workflow gives no scores.

    Args:
        found: result of `RolloutCollector.evaluate`.
        rows: the data items.
        num_samples: episodes of each item.

    Raises:
        DataError: `scores` or `rewards` is missing, or not [N].
    """
    finished = iter(() if found.batch is None else _outcomes(found.batch))
    samples = []
    for number in range(len(rows) * num_samples):
        item, sample = divmod(number, num_samples)
        reason = found.reasons.get(number)
        outcome = {"score": None, "reason": reason} if reason is not None else next(finished)
        samples.append(Sample(item=id_of(rows[item], item), sample=sample, **outcome))
    return samples


def id_of(row: Mapping[str, Any], number: int) -> str:
    """Return the id of a data item: its `id`, else its number in the data."""
    own = row.get("id")
    return str(number if own is None else own)


def _outcomes(batch: TensorDict) -> list[dict[str, Any]]:
    """Return score, truncation and length of each trajectory.

    Raises:
        DataError: `scores` or `rewards` is missing, or not [N].
    """
    key = "scores" if "scores" in batch else "rewards"
    if key not in batch:
        raise DataError("an evaluated trajectory has neither scores nor rewards; expected one of them")
    check_one_per_row(batch, key)
    index, first = trajectory_index(batch), first_rows(batch)
    scores = batch[key][first].double().tolist()
    truncated = _per_trajectory(batch, "truncated", index).bool().tolist()
    lengths = _per_trajectory(batch, "loss_mask", index).tolist()
    return [
        {"score": score, "truncated": cut, "length": length}
        for score, cut, length in zip(scores, truncated, lengths, strict=True)
    ]


def _per_trajectory(batch: TensorDict, key: str, index: torch.Tensor) -> torch.Tensor:
    """Return the sum of a key over the rows, and tokens, of each trajectory; 0 if the batch lacks it."""
    sums = torch.zeros(int(index[-1]) + 1, dtype=torch.int64)
    if key in batch:
        sums.index_add_(0, index, batch[key].long().reshape(len(batch), -1).sum(1))
    return sums


def _check_one_version(batch: TensorDict, name: str) -> None:
    made = batch["versions"][batch["versions"] >= 0].unique().tolist() if "versions" in batch else []
    if len(made) > 1:
        raise DataError(
            f"evaluation {name}: tokens of the policy versions {made}; expected one. The engine got other weights "
            "during the evaluation, or the workflow reports versions of its own"
        )
