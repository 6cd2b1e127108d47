"""Samples of an evaluation that were written earlier, and checked before they count."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from rlite.errors import ConfigError
from rlite.evaluation.journal import read_journal, time_of
from rlite.trainer.evaluate.folder import RESULTS, SAMPLES, first_problem, read_results

_OF_MODELS = ("config.json", "config.yaml")
"""files of a model, and of a run, which may also hold results"""
Lines = Sequence[Mapping[str, Any]]
"""lines of a journal after its settings"""


class _Shape(BaseModel):
    """A value of a journal. Further keys are not looked at."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _Row(_Shape):
    """A sample."""

    group: NonNegativeInt
    sample: NonNegativeInt
    item: str
    status: str
    reason: str
    score: FiniteFloat | None = None
    reward: FiniteFloat | None = None
    reward_parts: list[Annotated[list[Any], Field(min_length=2, max_length=2)]] | None = None
    truncated: bool | None = None
    answer: str | None = None
    response_tokens: int | None = None
    segments: list[dict[str, Any]] | None = None
    tokens: list[dict[str, Any]] = []

    @model_validator(mode="after")
    def _has_a_score_or_a_reason(self) -> Self:
        if self.score is None and self.reward is None and not self.reason:
            raise ValueError("expected a score, or a reason why there is none")
        return self

    @property
    def places(self) -> list[Hashable]:
        """Group and sample."""
        return [(self.group, self.sample)]


class _Task(_Shape):
    """A task that has ended, or one sample of its answers."""

    task: str
    sample: NonNegativeInt = 0
    samples: PositiveInt = 1
    metrics: dict[str, FiniteFloat]
    values: dict[str, list[FiniteFloat]] = {}
    higher_is_better: dict[str, bool] = {}
    lower_is_better: list[str] = []
    rows: list[_Row]

    @property
    def places(self) -> list[Hashable]:
        """The task and the sample; the first sample also gives the places of the further ones."""
        further = () if self.sample else range(1, self.samples)
        return [f"{self.task}, sample {sample}" if sample else self.task for sample in (self.sample, *further)]


class _Questions(_Shape):
    number: NonNegativeInt = 0


class _Sampling(_Shape):
    samples: PositiveInt
    temperature: FiniteFloat
    max_new_tokens: PositiveInt


class _Tasks(_Shape):
    tasks: list[str] = []


class _Settings(_Shape):
    """Settings that decide how many samples there are."""

    questions: _Questions
    sampling: _Sampling
    tasks: _Tasks

    @property
    def places(self) -> set[Hashable]:
        """Places of a complete journal: group and sample, or names of tasks, whose lines give further samples."""
        if self.tasks.tasks:
            return set(self.tasks.tasks)
        return set(product(range(self.questions.number), range(self.sampling.samples)))


@dataclass(frozen=True)
class EarlierResult:
    """One model's samples of an evaluation that has ended."""

    name: str
    model: str
    settings: Mapping[str, Any]
    lines: Lines
    """lines of the journal"""
    time: datetime | None = None
    """time that chat templates wrote"""


def earlier_result(given: str) -> EarlierResult | None:
    """Return the result in a folder; None if the path is no folder of results.

    Args:
        given: path of the folder.

    Raises:
        ConfigError: the folder holds results of two models, they cannot be read, or samples are missing.
    """
    file = Path(given).expanduser() / RESULTS
    if not file.is_file() or any((file.parent / name).exists() for name in _OF_MODELS):
        return None
    models = read_results(file).models
    if len(models) != 1:
        raise ConfigError(
            f"{file.parent}: an evaluation of two models ({' and '.join(models)}), compared in {RESULTS}. To compare "
            "one of them with others, evaluate it alone, into another folder"
        )
    [(name, found)] = models.items()
    journal = file.parent / SAMPLES / f"{name}.jsonl"
    settings, lines = read_journal(journal)
    if missing := missing_places(settings, lines, journal):
        num_expected = len(lines) + len(missing)
        what = "tasks" if settings["tasks"] else "samples"
        raise ConfigError(
            f"{file.parent}: an unfinished evaluation: {len(missing)} of {num_expected} {what} are missing; "
            "finish it first, by the command that began it (without overwrite=true)"
        )
    return EarlierResult(name, found.model, settings, lines, time_of(journal))


def missing_places(settings: Mapping[str, Any], lines: Lines, path: Path) -> set[Hashable]:
    """Return the places without a line, after a check of settings and lines.

    Args:
        settings: settings of the journal.
        lines: lines of the journal.
        path: the journal.

    Returns:
        Names of tasks with the numbers of their samples, or (group, sample).

    Raises:
        ConfigError: settings or lines have another form, or a line occurs twice.
    """
    try:
        expected = _Settings.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(f"{path}: settings: {first_problem(error)}; choose another folder") from error
    shape, missing = _Task if expected.tasks.tasks else _Row, expected.places
    for number, line in enumerate(lines, 2):
        try:
            place, *further = shape.model_validate(line).places
        except ValidationError as error:
            raise ConfigError(f"{path}, line {number}: {first_problem(error)}; choose another folder") from error
        if place not in missing:
            raise ConfigError(
                f"{path}, line {number}: {place} occurs twice, or is not of this evaluation; remove the line, or "
                "choose another folder"
            )
        missing.remove(place)
        missing.update(further)
    return missing
