"""One run on the pages: its config, metrics, record and trace, as far as they can be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rlite import files
from rlite.errors import ConfigError, DataError
from rlite.runtime.owner import LOCK, read_owner
from rlite.services.record.files import FOLDER as RECORD
from rlite.services.record.files import read_gaps
from rlite.services.record.reader import RecordReader, read_part_aside
from rlite.viewer.chain import ChainLog
from rlite.viewer.metrics import FILE, MetricsLog
from rlite.viewer.trace import TRACE, TraceLog
from rlite.yaml_texts import read_saved

CONFIG = "config.yaml"
Change = Literal["run", "trace"]
"""kind of news: config, metrics, record or results; or the trace, which only one page shows"""
LIVE_S = 60.0
"""seconds without a change after which a run no longer counts as live, at least"""
LIVE_STEPS = 3
"""steps of usual length without a change, after which a run no longer counts as live"""
RECENT = 10
"""steps that have the usual length"""
UNFINISHED = (
    "an evaluation that has not ended: these are the samples so far; if it was interrupted, the `rlite eval` command "
    "that began it continues it"
)


RESULTS = "results.json"
MAX_RESULTS = 64 << 20
"""bytes of a file that are read; a longer one is no JSON"""


TINKER = "tinker.json"
"""state of a server of the Tinker API"""
AUDIT = "audit.json"
MAX_SHOWN = 200
"""contradictions of an audit that a page shows"""


def read_audit(folder: Path) -> dict[str, Any] | None:
    """Return what `rlite audit` has found in a run; None if it has not been run, or its file cannot be read."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        with files.reading(folder / AUDIT, folder) as file:
            content = json.loads(file.read(MAX_RESULTS))
        found = [[str(own["place"])[:500], str(own["problem"])[:500]] for own in content["found"]]
        checked = {str(name): int(count) for name, count in content["checked"].items()}
        notes = [str(note)[:500] for note in content["not_checked"][:MAX_SHOWN]]
        return {"found": found[:MAX_SHOWN], "number": len(found), "checked": checked, "notes": notes}
    return None


def read_tinker(folder: Path) -> dict[str, Any]:
    """Return the state of a server of the Tinker API, as far as a page shows it.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with files.reading(folder / TINKER, folder) as file:
            content = json.loads(file.read(MAX_RESULTS))
        about = {name: content[name] for name in ("base", "samples", "num_models")}
        return {**about, "models": content["models"][:MAX_SHOWN]}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(f"{TINKER}: cannot be read: {type(error).__name__}: {str(error)[:200]}") from error


COMPARED = ("first", "second", "difference", "low", "high", "p_value")
"""keys of a comparison"""


@dataclass(frozen=True)
class Results:
    """The results of an evaluation, as far as the pages read them."""

    models: Mapping[str, dict[str, float]] = field(default_factory=dict)
    """metrics of each model by its name; empty without results"""
    comparison: Mapping[str, Any] | None = None
    """the difference of two models: the second less the first"""
    no_comparison: str = ""
    """why two models are not compared; "" without a reason"""
    questions: Mapping[str, str] = field(default_factory=dict)
    """identity of the questions that a model answered, by the name of the model"""


def _read_results(path: Path) -> tuple[Results, str]:
    """Return the results of an evaluation, and why the file cannot be read."""
    if not path.is_file():
        return Results(), ""
    try:
        with files.reading(path, path.parent) as file:
            content = json.loads(file.read(MAX_RESULTS))
        models = {
            name: {metric: float(value) for metric, value in about["metrics"].items()}
            for name, about in content["models"].items()
        }
        asked = {name: own.get("questions") or {} for name, own in content.get("settings", {}).items()}
        questions = {name: str(own["content"]) for name, own in asked.items() if own.get("content") is not None}
        if (comparison := content.get("comparison")) is not None:
            itemgetter(*COMPARED)(comparison)
        return Results(models, comparison, str(content.get("no_comparison", "")), questions), ""
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return Results(), f"{RESULTS}: cannot be read: {type(error).__name__}: {str(error)[:200]}"


def _read_config(path: Path) -> tuple[dict[str, Any], str]:
    """Return the config of a run, and why the file cannot be read."""
    try:
        return read_saved(path) if files.is_inside(path, path.parent) else {}, ""
    except FileNotFoundError:
        return {}, ""
    except ConfigError as error:
        return {}, str(error)


class ViewedRun:
    """A run's folder.

    Args:
        folder: the folder.
        name: name of the run on the pages.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.metrics = MetricsLog(folder / FILE)
        self.record = RecordReader(folder, read_part_aside)
        self.trace = TraceLog(folder / TRACE)
        self.chain = ChainLog(folder)
        self.prompts: dict[tuple[str, str], str] = {}
        """beginning of prompts that were read, by set and item"""
        self.prompts_read: set[tuple[str, int]] = set()
        """sources and steps whose prompts were read"""
        self.prompt_bytes = 0
        """bytes of texts, about, that were read for them"""
        self.results, self._results_problem = Results(), ""
        self.config: dict[str, Any] = {}
        self._config_problem = self._refresh_problem = ""
        self._stamps: dict[str, tuple[int, int] | None] = {}
        self.is_gone = False
        """the run's process has ended, as far as this machine can tell"""
        self.changed_at = 0.0
        """Unix time of the newest change"""

    def refresh(self) -> set[Change]:
        """Read new content. An unforeseen error becomes a problem of this run, so that other runs are still followed.

        Returns:
            The kinds of files that have changed.
        """
        try:
            changed, self._refresh_problem = self._refresh(), ""
        except Exception as error:
            changed, self._refresh_problem = set(), f"cannot be followed: {type(error).__name__}: {error}"
        return changed

    def _refresh(self) -> set[Change]:
        if has_config := self._is_new(CONFIG):  # a resumed run writes the file again
            self.config, self._config_problem = _read_config(self.folder / CONFIG)
        if has_results := self._is_new(RESULTS):
            self.results, self._results_problem = _read_results(self.folder / RESULTS)
        owner, was_gone = read_owner(self.folder / LOCK), self.is_gone
        self.is_gone = owner is not None and owner.is_gone
        has_metrics, has_record = self.metrics.refresh(), self.record.refresh()
        has_links = self.chain.refresh()
        if has_record:
            for source in self.record.sources:
                self.record.table(source)  # what is damaged is known from now on, and a page opens at once
            self.record.check_tokens()
        stamps = map(files.stamp, (self.metrics.path, self.folder / RECORD, self.folder / TINKER))
        self.changed_at = max(changed for changed, _ in filter(None, (*stamps, (0, 0)))) / 1e9
        is_new = has_config or has_results or has_metrics or has_record or has_links or was_gone != self.is_gone
        is_new |= self._is_new(TINKER)
        news: list[tuple[Change, bool]] = [("run", is_new), ("trace", self._is_new(TRACE))]
        return {kind for kind, is_new in news if is_new}

    def _is_new(self, name: str) -> bool:
        """Return whether a file has changed since the last call."""
        before, self._stamps[name] = self._stamps.get(name), files.stamp(self.folder / name)
        return self._stamps[name] != before

    @property
    def live_s(self) -> float:
        """Seconds without a change after which the run no longer counts as live; 0 if its process has ended."""
        if self.is_gone:
            return 0.0
        seconds = self.metrics.recent("seconds", RECENT)
        return max(LIVE_S, LIVE_STEPS * median(seconds)) if seconds else LIVE_S

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, if they are known."""
        trainer = self.config.get("trainer")
        given = trainer.get("total_steps") if isinstance(trainer, dict) else None
        return self.chain.begun.get("total_steps") or (given if type(given) is int else None)

    @property
    def state(self) -> str:
        """Finished, stopped or crashed; "" if the run may be under way."""
        return self.chain.state(self.metrics.last_step, self.total_steps, self.is_gone)

    @property
    def is_tinker(self) -> bool:
        """True for the folder of a server of the Tinker API."""
        return (self.folder / TINKER).exists()

    @property
    def can_record(self) -> bool:
        """False if the run's trainer has no option to record rollouts."""
        trainer = self.config.get("trainer")
        return not isinstance(trainer, dict) or "record" in trainer

    @property
    def evaluated(self) -> list[str]:
        """Sources of test sets; of an evaluation of finished models, those of the models that its results name."""
        names = {f"eval.{name}" for name in self.results.models}
        sources = [source for source in self.record.sources if source.startswith("eval.")]
        return [source for source in sources if source in names] or sources

    def set_of(self, source: str) -> str:
        """Return the set of a source's items. All models of an evaluation that answered the same questions share it."""
        questions = self.results.questions.get(source.removeprefix("eval."))
        return source if questions is None else f"questions {questions}"

    @property
    def problems(self) -> list[str]:
        """One message for each thing that cannot be shown."""
        found = [f"{name}: {reason}" for name, reason in sorted(self.record.problems.items())]
        parts = (CONFIG, RECORD)  # the others say so when they are read
        out = [name for name in parts if not files.is_inside(self.folder / name, self.folder)]
        found += [f"{name}: {files.LEADS_OUT}" for name in out]
        own = (self._config_problem, self._refresh_problem, self._results_problem)
        return [text for text in (*own, *found, *self.metrics.problems, *self.trace.problems) if text]

    @property
    def is_unfinished_evaluation(self) -> bool:
        """True for a folder of `rlite eval` without results."""
        return _has_samples(self.folder) and not (self.folder / RESULTS).exists()

    @property
    def notes(self) -> list[str]:
        """Information for the reader that is no problem."""
        is_own = files.is_inside(self.folder / RECORD, self.folder)
        gaps = [f"record: {gap}" for gap in read_gaps(self.folder)] if is_own else []
        return [UNFINISHED, *gaps] if self.is_unfinished_evaluation else gaps


def open_runs(folders: list[str]) -> list[ViewedRun]:
    """Return the runs in some folders.

    Raises:
        ConfigError: a folder holds no run.
    """
    paths = [Path(folder).expanduser() for folder in folders]
    if problems := [problem for path in paths if (problem := _no_run(path))]:
        raise ConfigError("\n".join(problems))
    runs = [ViewedRun(path, name) for path, name in zip(paths, _names(paths), strict=True)]
    for run in runs:
        run.refresh()
    return runs


def _no_run(path: Path) -> str:
    if not path.exists():
        return f"{path}: no such folder; expected the folder of a run (trainer.save_dir)"
    if not path.is_dir():
        return f"{path}: expected the folder of a run, found a file; give its folder: {path.parent}"
    if _has_samples(path) or any((path / name).exists() for name in (CONFIG, FILE, RECORD, TINKER)):
        return ""
    below = sorted(child.name for child in path.iterdir() if (child / CONFIG).exists() or (child / RECORD).is_dir())
    hint = f"runs below it: {', '.join(below[:5])}" if below else "give the folder that trainer.save_dir names"
    return f"{path}: not the folder of a run, it has none of {CONFIG}, {FILE} and record/; {hint}"


def _has_samples(path: Path) -> bool:
    """Return whether a folder holds samples of `rlite eval`, which may have no record and no results yet."""
    return not (path / CONFIG).exists() and any((path / "samples").glob("*.jsonl"))


def _names(paths: list[Path]) -> list[str]:
    """Return the last part of each path, or the whole path if two would have one name."""
    last = [path.resolve().name for path in paths]
    return last if len(set(last)) == len(last) else [str(path) for path in paths]
