"""The folder of an evaluation: its lock, its journals and its results.

A journal has the settings that decide the samples, then a line for each sample that has ended. Lines are only appended.
A process that is killed loses the samples that were under way. The next process removes a line that was cut off.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from io import FileIO
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlite import files
from rlite.config import Count, Finite, Natural
from rlite.data.chat.template import CLOCK
from rlite.errors import ConfigError, writing
from rlite.evaluation.metrics import Comparison, Sample
from rlite.evaluation.sets import Row, remove_record, write_record
from rlite.runtime.owner import FolderLock, lock_folder
from rlite.yaml_texts import differences, flat, some_of

VERSION = 1
"""version of the format"""
_BEGINNING = b'{"version": '
S = TypeVar("S", bound=BaseModel)
Settings = Mapping[str, Any]
"""values of JSON by key"""


class Journal:
    """The file to which the samples of one model go. Making it checks the file; `begin` opens or makes it.

    Its owner holds the folder's lock.

    Args:
        path: the file. One that exists is continued.
        settings: the settings that decide the samples.
        overwrite: start over, regardless of the content of the file.

    Raises:
        ConfigError: the file holds samples of other settings, or is no journal.
        StorageError: the file cannot be read.
    """

    def __init__(self, path: Path, settings: Settings, overwrite: bool = False) -> None:
        self.path, self._settings = path, settings
        with writing(path):
            content = b"" if overwrite or not path.is_file() else path.read_bytes()
        header, lines = _read(content, path)
        if header is not None and (different := changed_settings(_check_header(header, path), settings)):
            raise ConfigError(
                f"{path}: it holds samples of other settings ({different}). Continue with the former "
                "settings, choose another folder (out=FOLDER), or replace the samples (overwrite=true)"
            )
        self.lines: list[dict[str, Any]] = lines
        """samples that have ended, in the order of their ends"""
        self.is_new = header is None
        """there are no samples to continue"""
        self._end = content.rfind(b"\n") + 1
        self._file: FileIO | None = None

    def begin(self, time: datetime | None = None) -> None:
        """Remove what is not continued, and write the settings of a new journal.

        Args:
            time: time that chat templates write in the prompts of the samples.

        Raises:
            StorageError: the file cannot be written.
        """
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # without a buffer: what could not be written would be written again, and fail again, when it is closed
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)  # opens a pipe without waiting
            self._file = FileIO(descriptor, "r+")
            self._file.truncate(self._end)
        if self.is_new:
            began = {} if time is None else {"time": time.isoformat()}
            self._write({"version": VERSION, "settings": self._settings, **began})

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a sample that has ended, after `begin`.

        Args:
            line: values of JSON by key.

        Raises:
            StorageError: the file cannot be written.
        """
        self._write(line)
        self.lines.append(dict(line))

    def close(self) -> None:
        """Close the file, if it was begun."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        rest = made = json.dumps(line).encode() + b"\n"
        assert self._file is not None
        with writing(self.path):
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with suppress(OSError):  # a part of a line would damage the journal if another one followed
                    self._file.truncate(self._end)
                raise
        self._end += len(made)


def read_journal(path: Path) -> tuple[Settings, list[dict[str, Any]]]:
    """Return the settings and the samples of a journal, whether or not a process still writes it.

    Raises:
        ConfigError: there is no journal.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    header, lines = _read(content, path)
    return _check_header(header, path), lines


def time_of(path: Path) -> datetime | None:
    """Return the time that chat templates wrote in the prompts of a journal; None if the journal does not say it."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError), path.open("rb") as file:
        return datetime.fromisoformat(json.loads(file.readline())["time"])
    return None


def is_journal(path: Path) -> bool:
    """Return whether a file holds the samples of an evaluation."""
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING


def changed_settings(there: Settings, here: Settings) -> str:
    """Return the settings that differ, with both values; of many, the first; "" if none does."""
    return some_of(differences(dict(flat(there)), dict(flat(json.loads(json.dumps(here))))))


def _check_header(header: Mapping[str, Any] | None, path: Path) -> Settings:
    """Return the settings of a journal.

    Raises:
        ConfigError: the file is no journal, or of another version.
    """
    if header is None or not isinstance(header.get("settings"), dict):
        raise ConfigError(f"{path}: no settings of samples in it; choose another folder")
    if header.get("version") != VERSION:
        raise ConfigError(
            f"{path}: samples of format {header.get('version')}, and this version of rlite writes {VERSION}; choose "
            "another folder (out=FOLDER)"
        )
    return header["settings"]


def _read(content: bytes, path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return the header of a journal, None without one, and its further lines.

    A line that a killed process has cut off is left out.

    Raises:
        ConfigError: the file is no journal, or a line is no object of JSON.
    """
    if not (content.startswith(_BEGINNING) or _BEGINNING.startswith(content)):
        raise ConfigError(f"{path}: expected the samples of an evaluation, found another file")
    values = [_value(line, number, path) for number, line in enumerate(content.split(b"\n")[:-1], 1)]
    return (values[0], values[1:]) if values else (None, [])


def _value(line: bytes, number: int, path: Path) -> dict[str, Any]:
    """Return the value of a line.

    Raises:
        ConfigError: the line is no object of JSON.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number}: expected JSON: {error}; choose another folder") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}, line {number}: expected an object of JSON; choose another folder")
    return value


RESULTS = "results.json"
SAMPLES = "samples"
"""folder of the journals"""
CACHE = "cache"
"""folder of answers to tasks that have not ended"""
LOCK = ".eval.lock"
_OF_OTHERS = dict.fromkeys(("config.yaml", "metrics.jsonl", "state"), "training run") | {"config.json": "model"}
"""files of the folder of a run or a model, where results would hide its curves or count as its files"""


class _Shape(BaseModel):
    """A value of a file. Further keys are not looked at."""

    model_config = ConfigDict(strict=True)


class ModelResults(_Shape):
    """One model in results.json."""

    model: str
    """folder or hub name"""
    metrics: dict[str, Finite] = {}


class Results(_Shape):
    """The content of results.json, as far as it is read."""

    models: Annotated[dict[Annotated[str, AfterValidator(files.file_name)], ModelResults], Field(min_length=1)]
    """by name, which is also that of the journal"""


def read_results(file: Path) -> Results:
    """Return the content of results.json.

    Raises:
        ConfigError: it cannot be read, or it is not of an evaluation.
    """
    try:
        return Results.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    except ValidationError as error:
        raise ConfigError(f"{file}: not the results of an evaluation: {first_problem(error)}") from error


def first_problem(error: ValidationError) -> str:
    """Return the first problem of a value of JSON, with its place."""
    found = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, [".".join(map(str, found["loc"])), found["msg"]]))


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

    Args:
        folder: folder of the evaluation; it need not exist.

    Raises:
        ConfigError: the folder belongs to a run or a model.
    """
    for name, whose in _OF_OTHERS.items():
        if (folder / name).exists():
            raise ConfigError(
                f"out={folder}: it is the folder of a {whose}, which holds {name}; an evaluation needs a folder of its "
                f"own, such as out={folder.parent / f'eval-{folder.resolve().name}'}"
            )


def held(folder: Path) -> closing[FolderLock]:
    """Keep other evaluations out of a folder until the end of the block, which removes the lock and empty new folders.

    Args:
        folder: is made if it does not exist.

    Returns:
        The block's context manager.

    Raises:
        FolderInUse: another evaluation is under way there.
        StorageError: the folder cannot be written.
    """
    with writing(folder):
        in_use = f"out={folder}: another evaluation is under way there; choose another folder"
        return closing(lock_folder(folder, LOCK, in_use))


def check_alone(folder: Path, names: Collection[str]) -> None:
    """Check that a folder holds no samples or results of other models than these.

    Args:
        folder: folder of the evaluation; it need not exist.
        names: names of the models that are evaluated.

    Raises:
        ConfigError: it holds those of another model, or a results.json that cannot be read.
    """
    if others := _others(folder, names):
        raise ConfigError(
            f"out={folder}: it holds samples or results of {', '.join(others)}. Choose another folder (out=FOLDER), "
            "replace them (overwrite=true), or compare two models in one command (rlite eval MODEL MODEL2)"
        )


def remove_others(folder: Path, names: Collection[str]) -> None:
    """Remove samples and records of other models than these, and results.json if it contains them.

    Args:
        folder: folder of the evaluation.
        names: names of the models that are evaluated.

    Raises:
        StorageError: a file cannot be removed.
    """
    for name in _others(folder, names, ConfigError):
        remove_model(folder, name)
        with writing(folder / SAMPLES):
            (folder / SAMPLES / f"{name}.jsonl").unlink(missing_ok=True)


def remove_model(folder: Path, name: str) -> None:
    """Remove what is made of a model's samples: results.json, the record, and answers to tasks under way.

    Args:
        folder: folder of the evaluation.
        name: name of the model.

    Raises:
        StorageError: a file cannot be removed.
    """
    with writing(folder / RESULTS):
        (folder / RESULTS).unlink(missing_ok=True)
    remove_record(folder, name)
    shutil.rmtree(folder / CACHE / name, ignore_errors=True)


def _others(folder: Path, names: Collection[str], *ignored: type[Exception]) -> list[str]:
    """Return the names of other models whose samples or results a folder holds.

    Args:
        folder: folder of the evaluation.
        names: names of the models that are evaluated.
        *ignored: errors of results.json, which then counts as one without names.

    Raises:
        ConfigError: results.json cannot be read.
    """
    journals = sorted((folder / SAMPLES).glob("*.jsonl"))
    found = [path.stem for path in journals if path.is_file() and is_journal(path)]
    with suppress(*ignored):
        found += read_results(folder / RESULTS).models if (folder / RESULTS).is_file() else []
    return [name for name in dict.fromkeys(found) if name not in names]


_OF_MODELS = ("config.json", "config.yaml")
"""files of a model, and of a run, which may also hold results"""
Lines = Sequence[Mapping[str, Any]]
"""lines of a journal after its settings"""


class _Row(_Shape):
    """A sample."""

    group: Natural
    sample: Natural
    item: str
    status: str
    reason: str
    score: Finite | None = None
    reward: Finite | None = None
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
    sample: Natural = 0
    samples: Count = 1
    metrics: dict[str, Finite]
    values: dict[str, list[Finite]] = {}
    higher_is_better: dict[str, bool] = {}
    lower_is_better: list[str] = []
    rows: list[_Row]

    @property
    def places(self) -> list[Hashable]:
        """The task and the sample; the first sample also gives the places of the further ones."""
        further = () if self.sample else range(1, self.samples)
        return [f"{self.task}, sample {sample}" if sample else self.task for sample in (self.sample, *further)]


class _Questions(_Shape):
    number: Natural = 0


class _Sampling(_Shape):
    samples: Count
    temperature: Finite
    max_new_tokens: Count


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
class Answered:
    """A model, and its samples that have ended."""

    name: str
    model: str
    """folder or hub name of the checkpoint"""
    settings: Settings
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
        """Begin the journal, after all checks. A restart removes earlier results.

        Args:
            folder: folder of the evaluation.

        Raises:
            StorageError: a file cannot be written.
        """
        if self.journal.is_new:
            remove_model(folder, self.name)
        self.journal.begin(CLOCK.now())


def earlier_result(given: str) -> Answered | None:
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
    return Answered(name, found.model, settings, lines, time_of(journal))


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
    expected = _checked(_Settings, settings, f"{path}: settings")
    shape: type[_Task | _Row] = _Task if expected.tasks.tasks else _Row
    missing = expected.places
    for number, line in enumerate(lines, 2):
        place, *further = _checked(shape, line, f"{path}, line {number}").places
        if place not in missing:
            raise ConfigError(
                f"{path}, line {number}: {place} occurs twice, or is not of this evaluation; remove the line, or "
                "choose another folder"
            )
        missing.remove(place)
        missing.update(further)
    return missing


def _checked(shape: type[S], value: Mapping[str, Any], where: str) -> S:
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        raise ConfigError(f"{where}: {first_problem(error)}; choose another folder") from error


def write_results(folder: Path, models: Sequence[Answered], result: EvaluationResult) -> None:
    """Write the record, and then results.json, which appears when everything is written.

    Args:
        folder: folder of the evaluation.
        models: with all their samples.
        result: their metrics.

    Raises:
        StorageError: a file cannot be written.
    """
    remove_others(folder, [model.name for model in models])
    for model in models:
        write_record(folder, model.name, model.rows)
    written = {**result.to_json(), "settings": {model.name: model.settings for model in models}}
    with writing(folder / RESULTS):
        files.replace(folder / RESULTS, json.dumps(written, indent=2, allow_nan=False).encode())
