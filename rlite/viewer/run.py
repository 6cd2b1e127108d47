"""One run on the pages: its config, metrics, record and trace, as far as they can be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rlite import files
from rlite.arguments import read_saved
from rlite.errors import ConfigError
from rlite.runtime.owner import LOCK, read_owner
from rlite.services.record.files import FOLDER as RECORD
from rlite.services.record.files import read_gaps
from rlite.services.record.reader import RecordReader, is_recorded, read_part_aside
from rlite.viewer.metrics import FILE, MetricsLog
from rlite.viewer.trace import TRACE, TraceLog

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


class ResultsFile:
    """Reader of the results of an evaluation.

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        """why the file cannot be read"""
        self._content: Mapping[str, Any] = {}
        self._stamp: tuple[int, int] | None = None

    def refresh(self) -> bool:
        """Read the file if it has changed.

        Returns:
            True if it has changed.
        """
        stamp = files.stamp(self.path) if self.path.is_file() else None
        if stamp == self._stamp:
            return False
        self._stamp, self._content, self.problem = stamp, {}, ""
        if stamp:
            try:
                with files.reading(self.path, self.path.parent) as file:
                    self._content = _checked(json.loads(file.read(MAX_RESULTS)))
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                self.problem = f"{RESULTS}: cannot be read: {type(error).__name__}: {str(error)[:200]}"
        return True

    @property
    def models(self) -> dict[str, dict[str, float]]:
        """Metrics of each model by its name; empty without results."""
        return {name: dict(about["metrics"]) for name, about in self._content.get("models", {}).items()}

    @property
    def comparison(self) -> Mapping[str, Any] | None:
        """The difference of two models: the second less the first."""
        return self._content.get("comparison")

    @property
    def no_comparison(self) -> str:
        """Why two models are not compared; "" without a reason."""
        return str(self._content.get("no_comparison", ""))

    def questions(self, model: str) -> str | None:
        """Return the identity of the questions that a model answered; None if the results lack it."""
        settings = self._content.get("settings", {}).get(model, {})
        content = (settings.get("questions") or {}).get("content")
        return None if content is None else str(content)


def _checked(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the results if they have the form that the pages read."""
    for about in content["models"].values():
        for value in about["metrics"].values():
            float(value)
    for settings in content.get("settings", {}).values():
        (settings.get("questions") or {}).get("content")
    if (comparison := content.get("comparison")) is not None:
        for name in ("first", "second", "difference", "low", "high", "p_value"):
            comparison[name]
    return content


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
        self.results = ResultsFile(folder / RESULTS)
        self.trace = TraceLog(folder / TRACE)
        self.config: dict[str, Any] = {}
        self._config_problem = ""
        self._config_stamp: tuple[int, int] | None = None
        self._refresh_problem = ""
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
        changed = [
            self._refresh_config(),
            self.metrics.refresh(),
            self.record.refresh(),
            self.results.refresh(),
            self._refresh_owner(),
        ]
        if changed[2]:
            for source in self.record.sources:
                self.record.table(source)  # what is damaged is known from now on, and a page opens at once
            self.record.check_tokens()
        stamps = map(files.stamp, (self.metrics.path, self.folder / RECORD))
        self.changed_at = max(changed for changed, _ in filter(None, (*stamps, (0, 0)))) / 1e9
        news: list[tuple[Change, bool]] = [("run", any(changed)), ("trace", self.trace.look())]
        return {kind for kind, is_new in news if is_new}

    def _refresh_config(self) -> bool:
        stamp = files.stamp(self.folder / CONFIG)  # a resumed run writes the file again
        if stamp == self._config_stamp:
            return False
        self._config_stamp = stamp
        self.config, self._config_problem = _read_config(self.folder / CONFIG)
        return True

    def _refresh_owner(self) -> bool:
        owner = read_owner(self.folder / LOCK)
        was_gone, self.is_gone = self.is_gone, owner is not None and owner.is_gone
        return was_gone != self.is_gone

    @property
    def live_s(self) -> float:
        """Seconds without a change after which the run no longer counts as live; 0 if its process has ended."""
        if self.is_gone:
            return 0.0
        seconds = self.metrics.recent("seconds", RECENT)
        return max(LIVE_S, LIVE_STEPS * median(seconds)) if seconds else LIVE_S

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
        questions = self.results.questions(source.removeprefix("eval."))
        return source if questions is None else f"questions {questions}"

    @property
    def problems(self) -> list[str]:
        """One message for each thing that cannot be shown."""
        found = [f"{name}: {reason}" for name, reason in sorted(self.record.problems.items())]
        parts = (CONFIG, RECORD)  # the others say so when they are read
        found += [
            f"{name}: {files.LEADS_OUT}" for name in parts if not files.is_inside(self.folder / name, self.folder)
        ]
        own = (self._config_problem, self._refresh_problem, self.results.problem)
        return [text for text in (*own, *found, *self.metrics.problems, *self.trace.problems) if text]

    @property
    def is_unfinished_evaluation(self) -> bool:
        """True for a folder of `rlite eval` without results."""
        return _has_samples(self.folder) and not self.results.path.exists()

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
    if is_recorded(path) or _has_samples(path) or any((path / name).exists() for name in (CONFIG, FILE)):
        return ""
    below = sorted(child.name for child in path.iterdir() if (child / CONFIG).exists() or is_recorded(child))
    hint = f"runs below it: {', '.join(below[:5])}" if below else "give the folder that trainer.save_dir names"
    return f"{path}: not the folder of a run, it has none of {CONFIG}, {FILE} and record/; {hint}"


def _has_samples(path: Path) -> bool:
    """Return whether a folder holds samples of `rlite eval`, which may have no record and no results yet."""
    return not (path / CONFIG).exists() and any((path / "samples").glob("*.jsonl"))


def _names(paths: list[Path]) -> list[str]:
    """Return the last part of each path, or the whole path if two would have one name."""
    last = [path.resolve().name for path in paths]
    return last if len(set(last)) == len(last) else [str(path) for path in paths]


def _read_config(path: Path) -> tuple[dict[str, Any], str]:
    try:
        return read_saved(path) if files.is_inside(path, path.parent) else {}, ""
    except FileNotFoundError:
        return {}, ""
    except ConfigError as error:
        return {}, str(error)
