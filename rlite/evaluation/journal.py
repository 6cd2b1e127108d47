"""The journal of one model's samples: it is checked, read and appended to, and says which samples are missing.

A journal has the settings that decide the samples, then a line for each sample that has ended. Lines are only appended.
A process that is killed loses the samples that were under way. The next process removes a line that was cut off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Mapping
from contextlib import suppress
from datetime import datetime
from io import FileIO
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlite.config import Count, Finite, Natural
from rlite.errors import ConfigError, writing
from rlite.evaluation.metrics import Lines
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

    `path`: the file. One that exists is continued.
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
        """Remove what is not continued, and write the settings of a new journal."""
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

        `line`: values of JSON by key.
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
    """Return the settings and the samples of a journal, whether or not a process still writes it."""
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
    """Return the settings of a journal."""
    if header is None or not isinstance(header.get("settings"), dict):
        raise ConfigError(f"{path}: no settings of samples in it; choose another folder")
    if header.get("version") != VERSION:
        told = f"{path}: samples of format {header.get('version')}, and this version of rlite writes {VERSION}"
        raise ConfigError(f"{told}; choose another folder (out=FOLDER)")
    return header["settings"]


def _read(content: bytes, path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return the header of a journal, None without one, and its further lines.

    A line that a killed process has cut off is left out.
    """
    if not (content.startswith(_BEGINNING) or _BEGINNING.startswith(content)):
        raise ConfigError(f"{path}: expected the samples of an evaluation, found another file")
    values = [_value(line, number, path) for number, line in enumerate(content.split(b"\n")[:-1], 1)]
    return (values[0], values[1:]) if values else (None, [])


def _value(line: bytes, number: int, path: Path) -> dict[str, Any]:
    """Return the value of a line."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number}: expected JSON: {error}; choose another folder") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}, line {number}: expected an object of JSON; choose another folder")
    return value


class Shape(BaseModel):
    """A value of a file. Further keys are not looked at."""

    model_config = ConfigDict(strict=True)


def first_problem(error: ValidationError) -> str:
    """Return the first problem of a value of JSON, with its place."""
    found = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, [".".join(map(str, found["loc"])), found["msg"]]))


class _Row(Shape):
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


class _Task(Shape):
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


class _Questions(Shape):
    number: Natural = 0


class _Sampling(Shape):
    samples: Count
    temperature: Finite
    max_new_tokens: Count


class _Tasks(Shape):
    tasks: list[str] = []


class _Settings(Shape):
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


def missing_places(settings: Mapping[str, Any], lines: Lines, path: Path) -> set[Hashable]:
    """Return the places without a line, after a check of settings and lines.

    Returns names of tasks with the numbers of their samples, or (group, sample).
    """
    expected = _checked(_Settings, settings, f"{path}: settings")
    shape: type[_Task | _Row] = _Task if expected.tasks.tasks else _Row
    missing = expected.places
    for number, line in enumerate(lines, 2):
        place, *further = _checked(shape, line, f"{path}, line {number}").places
        if place not in missing:
            remedy = "remove the line, or choose another folder"
            raise ConfigError(f"{path}, line {number}: {place} occurs twice, or is not of this evaluation; {remedy}")
        missing.remove(place)
        missing.update(further)
    return missing


def _checked(shape: type[S], value: Mapping[str, Any], where: str) -> S:
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        raise ConfigError(f"{where}: {first_problem(error)}; choose another folder") from error
