"""Observers of a run: usage, the record, sinks of metrics, the console, a trace, and a watcher of the process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from rlite import files
from rlite.assembly.prints import PrintLog
from rlite.data.packs import layout
from rlite.engine.inference import RliteInferenceEngine
from rlite.errors import writing
from rlite.evaluation.record import EvaluationRecord
from rlite.rollout.collector.calls import RolloutCollector
from rlite.rollout.collector.ended import Ended
from rlite.rollout.collector.lost_groups import NOT_ACCEPTED
from rlite.services.console.observers import RunReport, SinkLog, StepTrace
from rlite.services.recovery import record
from rlite.trainer.callbacks import Metrics
from rlite.trainer.options import RecordOptions
from rlite.trainer.rl.options import EqualRewards
from rlite.trainer.run.best import BEST
from rlite.trainer.run.folder import LEARNING
from rlite.trainer.run.observer import Observer, ReportedMetrics
from rlite.trainer.run.training_run import TrainingRun
from rlite.types import Status


class StepReport(Observer):
    """Reports each step to the process that has started this one, if it watches."""

    def on_start(self, run: TrainingRun, metrics: Metrics) -> None:
        """Report the step after which the run begins."""
        record.report_step(run.step, run.total_steps)

    on_step = on_start


class LearningFacts(Observer):
    """Writes once what the run learns from."""

    def __init__(self, equal_rewards: EqualRewards) -> None:
        self._facts = {"equal_rewards": equal_rewards._asdict()}

    def on_start(self, run: TrainingRun, metrics: Metrics) -> None:
        """Write the facts into the run's folder."""
        with writing(run.folder / LEARNING):
            files.replace(run.folder / LEARNING, json.dumps(self._facts).encode())


class TemplateFile(Observer):
    """Writes the chat template that the options name beside each exported model, so that it is served with it.

    `path`: the file of the template; None writes nothing.
    """

    def __init__(self, path: str | None) -> None:
        self._text = None if path is None else Path(path).expanduser().read_text(encoding="utf-8")

    def on_save(self, run: TrainingRun, metrics: Metrics) -> None:
        """Write the template into the folders of the newest and of the best model."""
        for folder in (run.folder / "latest", run.folder / BEST):
            if self._text is not None and folder.is_dir():
                with writing(folder):
                    files.replace(folder / "chat_template.jinja", self._text.encode())

    on_end = on_save


def run_observers(
    run: TrainingRun,
    reported: ReportedMetrics,
    name: str,
    plan: Callable[[], Mapping[str, str]],
    progress: Callable[[], str] | None = None,
) -> list[Observer]:
    """Return the observers that log and show a run, in the order in which they are called.

    Observers before them may enter metrics. Observers after them may say something about a step.
    """
    options = run.config.trainer
    report = RunReport(options, reported, f"rlite {name}", plan, progress)
    return [SinkLog(options), report, PrintLog(run), StepTrace(options, run.folder), StepReport()]


EQUAL_REWARDS = "all rewards of the group are equal"
UNLIKE = "its keys or types are unlike those of the batch"
LEFT_OUT = "the trainer left its group out of the batch"
Layout = frozenset[tuple[Any, ...]]
"""layout of a trajectory from `rlite.data.packs.layout`"""


class RunRecord(EvaluationRecord):
    """Joins the groups that the collector has kept with the batch that was trained on.

    A run that resumes at step S deletes records of later steps. Groups that are under way when a run ends are recorded
    as aborted, under the step that follows the last one.

    `is_filtering`: groups of equal rewards are replaced.
    """

    def __init__(
        self, options: RecordOptions, run: TrainingRun, engine: RliteInferenceEngine, is_filtering: bool
    ) -> None:
        super().__init__(options, run)
        self._engine, self._is_filtering = engine, is_filtering
        self._collector: RolloutCollector | None = None

    def begin(self) -> None:
        """Begin, after the run has opened its folder and the engines are built."""
        self._collector = self._engine.collector
        self.open(self._engine.tokenizer)

    def on_train(self, run: TrainingRun, metrics: dict[str, float]) -> None:
        """Record the rollouts of a step."""
        if run.batch is not None:
            self.step(run.batch)

    def step(self, batch: TensorDict) -> None:
        """Record the finished step."""
        assert self._collector is not None
        ended, trained = self._collector.take_ended(), set(batch["group_ids"].tolist())
        skipped = set(batch["group_ids"][batch["is_skipped"]].tolist()) if "is_skipped" in batch else set()
        outcome = Outcome(ended=ended, trained=trained, skipped=skipped, is_filtering=self._is_filtering)
        self._recorder.record(self._run.step, [outcome.decide(group) for group in ended], batch)
        self._tell_of_limit()

    def _end(self, reason: str) -> None:
        """Record the groups under way, and close."""
        if self._collector is not None:  # else the run ended before it began
            outcome = Outcome(is_filtering=self._is_filtering, aborted=reason)
            groups = [outcome.decide(group) for group in self._collector.take_all(reason)]
            self._recorder.record(self._run.step + 1, groups)
        super()._end(reason)


def layouts_of(groups: Iterable[Ended]) -> frozenset[Layout]:
    """Return the layouts of the trajectories of groups."""
    episodes = [episode for group in groups for episode in group.episodes]
    return frozenset(layout(episode.trajectory) for episode in episodes if episode.trajectory is not None)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Fate of the groups that have ended before or in a step."""

    ended: Sequence[Ended] = ()
    """groups that have ended; those in the batch are among them"""
    trained: Set[int] = frozenset()
    """numbers of the groups in the batch that was trained on"""
    skipped: Set[int] = frozenset()
    """numbers of the groups in the batch with a row whose update was skipped"""
    is_filtering: bool = False
    """groups of equal rewards are replaced"""
    aborted: str = ""
    """why nothing was trained on; "" if a batch was"""

    @cached_property
    def _layouts(self) -> frozenset[Layout]:
        """Layouts of the trajectories in the batch."""
        return layouts_of(group for group in self.ended if group.group in self.trained)

    def decide(self, group: Ended) -> Ended:
        """Return a group that was lost or consumed, with its status and reason."""
        status, reason = self._decide(group)
        return replace(group, status=status, reason=reason)

    def _decide(self, group: Ended) -> tuple[Status, str]:
        if group.reason == NOT_ACCEPTED.reason and self.is_filtering:
            return "filtered", EQUAL_REWARDS
        if group.status is not None:
            return group.status, group.reason
        if self.aborted:
            return "aborted", self.aborted
        if group.group in self.trained:
            return ("skipped" if group.group in self.skipped else "trained"), ""
        if self._layouts and not layouts_of([group]) <= self._layouts:
            return "refused", UNLIKE
        return ("filtered", EQUAL_REWARDS) if self.is_filtering and _is_uniform(group) else ("refused", LEFT_OUT)


def _is_uniform(group: Ended) -> bool:
    rewards = [episode.trajectory["rewards"][0] for episode in group.episodes if episode.trajectory is not None]
    return all(reward.equal(rewards[0]) for reward in rewards)
