"""The models of an evaluation, and the samples that each has so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rlite.data.chat.clock import CLOCK
from rlite.evaluation.journal import Journal, time_of
from rlite.evaluation.rows import Row
from rlite.trainer.commands.generate import check_writes, model_folder
from rlite.trainer.evaluate.earlier_results import EarlierResult, missing_places
from rlite.trainer.evaluate.folder import SAMPLES, remove_model
from rlite.trainer.evaluate.options import EvalConfig
from rlite.trainer.evaluate.settings import model_settings


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

    @property
    def time(self) -> datetime | None:
        """Time that chat templates wrote in the prompts of the lines."""
        return None if self.journal.is_new else time_of(self.journal.path)


Answered = Candidate | EarlierResult


def rows_of(model: Answered) -> list[Row]:
    """Return the rows of a model's samples. A line of the journal is a row, or a task with many."""
    if not is_of_tasks(model):
        return [dict(row) for row in model.lines]
    groups: dict[tuple[str, str], int] = {}
    keyed = [((line["task"], each["item"]), each) for line in model.lines for each in line["rows"]]
    return [{**each, "group": groups.setdefault(key, len(groups))} for key, each in keyed]


def is_of_tasks(model: Answered) -> bool:
    """Return whether a model has answered tasks."""
    return bool(model.settings.get("tasks"))


def candidate(
    given: str, name: str, settings: Mapping[str, Any], folder: Path, options: EvalConfig, journals: ExitStack
) -> Candidate:
    """Return a model with the samples that its journal holds.

    Args:
        given: folder of a model or of a run, or hub name.
        name: name of the model in the record.
        settings: further settings that decide the samples.
        folder: holds the journals.
        options: options of the command.
        journals: closes the journal at its end.

    Raises:
        ConfigError: there is no such model, it writes no text, or the journal holds samples of other settings,
            or lines that are no samples.
    """
    model = model_folder(given)
    check_writes(model)
    own = {"model": model_settings(model), **settings}
    journal = Journal(folder / SAMPLES / f"{name}.jsonl", own, options.overwrite)
    journals.callback(journal.close)
    missing_places(own, journal.lines, journal.path)
    return Candidate(name, model, own, journal)


def begin(candidates: Sequence[Candidate], folder: Path) -> None:
    """Begin the journals, after all checks. A restart removes earlier results.

    Args:
        candidates: models that answer now.
        folder: folder of the evaluation.

    Raises:
        StorageError: a file cannot be written.
    """
    for each in candidates:
        if each.journal.is_new:
            remove_model(folder, each.name)
        each.journal.begin(CLOCK.now())
