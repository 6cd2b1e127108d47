"""Observers: rlite's own callbacks, which see more of a run than a user's, and the console that they give it.

    start ──> on_start
    step  ──> on_train ──> [on_answers ──> on_evaluate] ──> on_step ──> [before_save ──> on_save]
    end   ──> close

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlite.trainer.callbacks import Callback, Metrics

if TYPE_CHECKING:
    from rlite.trainer.run.training_run import TrainingRun

Rows = Mapping[str, Any] | Sequence[tuple[str, Any]]
DRIFT_LIMIT = 0.1
"""mean |log p(trainer) - log p(engine)| per token, in nats. Above it, the two are not the same policy; if rollouts run
ahead, the policy has moved too far"""


@dataclass(frozen=True, kw_only=True)
class ReportedMetrics:
    """The names of the metrics that a run shows."""

    of_steps: Sequence[str] = ()
    """metrics of every step for the console, the most important first"""
    headlines: Sequence[str] = ()
    """metrics of evaluations for the console"""
    compared: Sequence[str] = ()
    """metrics of evaluations for the comparison at the end"""
    evaluated: Sequence[str] = ()
    """metrics of evaluations from which `best_metric` and `stop_at` choose"""


class Observer(Callback):
    """A callback of rlite's own, which sees more of the run than a user's. Observers are called before the callbacks.

    An error in an observer ends the run at once: it is no mistake of the user's. A number that an observer enters into
    the metrics of `on_train` or `on_step` is logged in the step's own line.
    """

    def on_train(self, run: TrainingRun, metrics: dict[str, float]) -> None:
        """Take the metrics of a step's update, before its evaluations. `run.batch` is what was trained on."""

    def on_answers(self, run: TrainingRun, step: int, evaluations: Sequence[Any]) -> None:
        """Take evaluations by answers."""

    def on_log(self, run: TrainingRun, metrics: Metrics) -> None:
        """Take metrics of evaluations that are logged in a line of their own."""

    def on_added(self, run: TrainingRun, metrics: Metrics) -> None:
        """Take metrics that callbacks have added."""

    def before_save(self, run: TrainingRun) -> None:
        """Keep what a run that resumes from the checkpoint of this step does not make again."""

    def close(self, run: TrainingRun, error: BaseException | None) -> None:
        """End, after `on_end` or after an error, which is given. Only observers that have started are closed."""


class Console:
    """Console that shows nothing. Services extend it."""

    def report(self, title: str, rows: Rows, style: str = "") -> None:
        """Show a titled table.

        `style`: style of the title; "" is plain.
        """

    def alarm(self, title: str, rows: Rows) -> None:
        """Show that something is wrong with the run."""
        self.report(title, rows, style="red")

    def warn(self, title: str, rows: Rows) -> None:
        """Show that something was lost, and the run goes on."""
        self.report(title, rows, style="yellow")

    def note(self, text: str) -> None:
        """Show how far the work under way is."""
