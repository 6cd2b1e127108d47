"""The folder of an evaluation: its lock, its results, and the samples of its models.

The samples are in journals, from which the record and results.json are made.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from rlite import files
from rlite.config import Finite
from rlite.data.chat.template import CLOCK
from rlite.errors import ConfigError, writing
from rlite.evaluation.journal import Journal, Shape, first_problem, is_journal, missing_places, read_journal, time_of
from rlite.evaluation.metrics import Comparison, Lines, Sample
from rlite.evaluation.record import Row, remove_record, write_record
from rlite.runtime.owner import FolderLock, lock_folder

RESULTS = "results.json"
SAMPLES = "samples"
"""folder of the journals"""
CACHE = "cache"
"""folder of answers to tasks that have not ended"""
LOCK = ".eval.lock"
_OF_OTHERS = dict.fromkeys(("config.yaml", "metrics.jsonl", "state"), "training run") | {"config.json": "model"}
"""files of the folder of a run or a model, where results would hide its curves or count as its files"""


class ModelResults(Shape):
    """One model in results.json."""

    model: str
    """folder or hub name"""
    metrics: dict[str, Finite] = {}


class Results(Shape):
    """The content of results.json, as far as it is read."""

    models: Annotated[dict[Annotated[str, AfterValidator(files.file_name)], ModelResults], Field(min_length=1)]
    """by name, which is also that of the journal"""


def read_results(file: Path) -> Results:
    """Return the content of results.json."""
    try:
        return Results.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    except ValidationError as error:
        raise ConfigError(f"{file}: not the results of an evaluation: {first_problem(error)}") from error


@dataclass(frozen=True)
class EvaluatedModel:
    """The samples of one model, and their metrics."""

    name: str
    """name in tables and in the record"""
    model: str
    """folder or hub name"""
    metrics: Mapping[str, float]
    """metrics from `rlite.evaluation.metrics.summary`; those of tasks are named TASK/METRIC"""
    samples: Sequence[Sample] = field(repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """settings that decided the samples"""
    higher_is_better: Mapping[str, bool] = field(default_factory=dict, repr=False)
    """direction of metrics: true if a higher value is better; of the metrics of tasks that say it"""

    def to_json(self) -> dict[str, Any]:
        """Return model, metrics and their directions as values of JSON."""
        directions = {"higher_is_better": dict(self.higher_is_better)} if self.higher_is_better else {}
        return {"model": self.model, "metrics": dict(self.metrics), **directions}


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation."""

    models: Sequence[EvaluatedModel]
    """one, or two that answered the same items"""
    comparison: Comparison | None = None
    """the second model less the first; None for one model, or if there is no common measure"""
    no_comparison: str = ""
    """why two models are not compared"""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the first model."""
        return self.models[0].metrics

    @property
    def samples(self) -> Sequence[Sample]:
        """Samples of the first model."""
        return self.models[0].samples

    def to_json(self) -> dict[str, Any]:
        """Return metrics and comparison as values of JSON."""
        models = {each.name: each.to_json() for each in self.models}
        names = dict(zip(("first", "second"), models, strict=False))
        comparison = None if self.comparison is None else names | asdict(self.comparison)
        reason = {"no_comparison": self.no_comparison} if self.no_comparison else {}
        return {"models": models, "comparison": comparison, **reason}


def check_no_run(folder: Path) -> None:
    """Check that a folder does not belong to a training run or a model.

    `folder`: folder of the evaluation; it need not exist.
    """
    for name, whose in _OF_OTHERS.items():
        if (folder / name).exists():
            raise ConfigError(
                f"out={folder}: it is the folder of a {whose}, which holds {name}; an evaluation needs a folder of its "
                f"own, such as out={folder.parent / f'eval-{folder.resolve().name}'}"
            )


def held(folder: Path) -> closing[FolderLock]:
    """Keep other evaluations out of a folder until the end of the block, which removes the lock and empty new folders.

    Returns the block's context manager.
    """
    with writing(folder):
        in_use = f"out={folder}: another evaluation is under way there; choose another folder"
        return closing(lock_folder(folder, LOCK, in_use))


def check_alone(folder: Path, names: Collection[str]) -> None:
    """Check that a folder holds no samples or results of other models than these.

    `folder`: folder of the evaluation; it need not exist.
    """
    if others := _others(folder, names):
        raise ConfigError(
            f"out={folder}: it holds samples or results of {', '.join(others)}. Choose another folder (out=FOLDER), "
            "replace them (overwrite=true), or compare two models in one command (rlite eval MODEL MODEL2)"
        )


def remove_others(folder: Path, names: Collection[str]) -> None:
    """Remove samples and records of other models than these, and results.json if it contains them."""
    for name in _others(folder, names, ConfigError):
        remove_model(folder, name)
        with writing(folder / SAMPLES):
            (folder / SAMPLES / f"{name}.jsonl").unlink(missing_ok=True)


def remove_model(folder: Path, name: str) -> None:
    """Remove what is made of a model's samples: results.json, the record, and answers to tasks under way."""
    with writing(folder / RESULTS):
        (folder / RESULTS).unlink(missing_ok=True)
    remove_record(folder, name)
    shutil.rmtree(folder / CACHE / name, ignore_errors=True)


def _others(folder: Path, names: Collection[str], *ignored: type[Exception]) -> list[str]:
    """Return the names of other models whose samples or results a folder holds."""
    found = [path.stem for path in sorted((folder / SAMPLES).glob("*.jsonl")) if path.is_file() and is_journal(path)]
    with suppress(*ignored):
        found += read_results(folder / RESULTS).models if (folder / RESULTS).is_file() else []
    return [name for name in dict.fromkeys(found) if name not in names]


_OF_MODELS = ("config.json", "config.yaml")
"""files of a model, and of a run, which may also hold results"""


@dataclass(frozen=True)
class Answered:
    """A model, and its samples that have ended."""

    name: str
    model: str
    """folder or hub name of the checkpoint"""
    settings: Mapping[str, Any]
    lines: Lines
    """lines of the journal"""
    time: datetime | None = None
    """time that chat templates wrote in the prompts of the lines"""

    @property
    def is_of_tasks(self) -> bool:
        """True if the model has answered tasks."""
        return bool(self.settings.get("tasks"))

    @property
    def rows(self) -> list[Row]:
        """Rows of the samples. A line of the journal is a row, or a task with many."""
        if not self.is_of_tasks:
            return [dict(row) for row in self.lines]
        groups: dict[tuple[str, str], int] = {}
        keyed = [((line["task"], each["item"]), each) for line in self.lines for each in line["rows"]]
        return [{**each, "group": groups.setdefault(key, len(groups))} for key, each in keyed]


@dataclass(frozen=True)
class Candidate(Answered):
    """A model that answers now, or whose evaluation continues. Its lines are those of the journal, which grows."""

    journal: Journal = field(kw_only=True)

    def begin(self, folder: Path) -> None:
        """Begin the journal, after all checks. A restart removes earlier results."""
        if self.journal.is_new:
            remove_model(folder, self.name)
        self.journal.begin(CLOCK.now())


def earlier_result(given: str) -> Answered | None:
    """Return the result in a folder; None if the path is no folder of results."""
    file = Path(given).expanduser() / RESULTS
    if not file.is_file() or any((file.parent / name).exists() for name in _OF_MODELS):
        return None
    models = read_results(file).models
    if len(models) != 1:
        told = f"{file.parent}: an evaluation of two models ({' and '.join(models)}), compared in {RESULTS}"
        raise ConfigError(f"{told}. To compare one of them with others, evaluate it alone, into another folder")
    [(name, found)] = models.items()
    journal = file.parent / SAMPLES / f"{name}.jsonl"
    settings, lines = read_journal(journal)
    if missing := missing_places(settings, lines, journal):
        what = "tasks" if settings["tasks"] else "samples"
        raise ConfigError(
            f"{file.parent}: an unfinished evaluation: {len(missing)} of {len(lines) + len(missing)} {what} are "
            "missing; finish it first, by the command that began it (without overwrite=true)"
        )
    return Answered(name, found.model, settings, lines, time_of(journal))


def write_results(folder: Path, models: Sequence[Answered], result: EvaluationResult) -> None:
    """Write the record, and then results.json, which appears when everything is written."""
    remove_others(folder, [model.name for model in models])
    for model in models:
        write_record(folder, model.name, model.rows)
    written = {**result.to_json(), "settings": {model.name: model.settings for model in models}}
    with writing(folder / RESULTS):
        files.replace(folder / RESULTS, json.dumps(written, indent=2, allow_nan=False).encode())
