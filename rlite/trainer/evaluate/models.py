"""The models of an evaluation, and the samples that each has so far."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlite.errors import ConfigError, writing
from rlite.evaluation.journal import Journal, read_journal
from rlite.evaluation.rows import Row
from rlite.trainer.evaluate.options import EvalConfig
from rlite.trainer.evaluate.settings import model_settings
from rlite.trainer.generate import check_writes, model_folder

RESULTS = "results.json"
SAMPLES = "samples"
"""folder of the journals"""
CACHE = "cache"
"""folder of answers to tasks that have not ended"""
_OF_MODELS = ("config.json", "config.yaml")
"""files of a model, and of a run, which may also hold results"""
_GENERAL = ("latest", "best", "")
"""names of folders that do not tell whose they are"""


@dataclass(frozen=True)
class EarlierResult:
    """One model's samples of an evaluation that has ended."""

    name: str
    model: str
    settings: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    """lines of the journal"""


@dataclass(frozen=True)
class Candidate:
    """A model that answers now, or whose evaluation continues."""

    name: str
    model: str
    """folder or hub name of the checkpoint"""
    settings: Mapping[str, Any]
    journal: Journal

    @property
    def lines(self) -> Sequence[Mapping[str, Any]]:
        """Lines of the journal."""
        return self.journal.lines


Answered = Candidate | EarlierResult


def rows_of(model: Answered) -> list[Row]:
    """Return the rows of a model's samples. A line of the journal is a row, or a task with many."""
    rows = [row for line in model.lines for row in line.get("rows", [line])]
    return [{**row, "group": number} for number, row in enumerate(rows)] if is_of_tasks(model) else rows


def is_of_tasks(model: Answered) -> bool:
    """Return whether a model has answered tasks."""
    return bool(model.settings.get("tasks"))


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
    try:
        models = json.loads(file.read_bytes())["models"]
        names = list(models)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: not the results of an evaluation: {type(error).__name__}: {error}") from error
    if len(names) != 1:
        raise ConfigError(f"{file}: results of {', '.join(names)}; expected those of one model")
    settings, lines = read_journal(file.parent / SAMPLES / f"{names[0]}.jsonl")
    found = EarlierResult(names[0], models[names[0]]["model"], settings, lines)
    if num_missing := _num_expected(settings) - len(lines):
        what = "tasks" if is_of_tasks(found) else "samples"
        raise ConfigError(
            f"{file.parent}: an unfinished evaluation: {num_missing} of {_num_expected(settings)} {what} are missing; "
            "finish it first, by the command that began it (without overwrite=true)"
        )
    return found


def _num_expected(settings: Mapping[str, Any]) -> int:
    """Return the number of lines of a journal that is complete."""
    if tasks := settings["tasks"]:
        return len(tasks["tasks"])
    return settings["questions"]["number"] * settings["sampling"]["samples"]


def candidate(
    given: str, name: str, settings: Mapping[str, Any], folder: Path, options: EvalConfig, journals: ExitStack
) -> Candidate:
    """Return a model with the samples that its journal holds.

    Args:
        given: folder of a model or of a run, or hub name.
        name: name of the model in the record.
        settings: whatever else decides the samples.
        folder: holds the journals.
        options: of the command.
        journals: closes the journal at its end.

    Raises:
        ConfigError: there is no such model, it writes no text, or the journal holds samples of other settings.
        FolderInUse: another process writes the journal.
    """
    model = model_folder(given)
    check_writes(model)
    own = {"model": model_settings(model), **settings}
    journal = Journal(folder / SAMPLES / f"{name}.jsonl", own, options.overwrite)
    journals.callback(journal.close)
    return Candidate(name, model, own, journal)


def begin(candidates: Sequence[Candidate], folder: Path) -> None:
    """Begin the journals, after all checks. Of a model that begins anew, former results and answers are removed.

    Args:
        candidates: models that answer now.
        folder: of the evaluation.

    Raises:
        StorageError: a file cannot be written.
    """
    for each in candidates:
        if each.journal.is_new:
            with writing(folder / RESULTS):
                (folder / RESULTS).unlink(missing_ok=True)
            shutil.rmtree(folder / CACHE / each.name, ignore_errors=True)
        each.journal.begin()


def names_of(options: EvalConfig) -> list[str]:
    """Return a name for each model: the option, or the names of their folders, made different."""
    if options.name is not None:
        return [options.name]
    first = _name(options.model)
    if options.other is None:
        return [first]
    second = _name(options.other)
    return [first, f"{second}-2" if second == first else second]


def _name(given: str) -> str:
    parts = [part for part in Path(given).expanduser().resolve().parts if part not in _GENERAL]
    return re.sub(r"[^\w.-]+", "_", parts[-1]).strip("._-") or "model"
