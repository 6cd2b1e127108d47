"""The run loop that every trainer shares, and the state of its run."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from tensordict import TensorDict

from rlite.data.packs import sequence_lengths
from rlite.errors import DivergedError, RolloutError, StreamedDataError
from rlite.observability import stats_tracker, trace
from rlite.runtime.storage.atomic import discard
from rlite.trainer.callbacks import Callback, Callbacks, Event
from rlite.trainer.options import RunOptions
from rlite.trainer.run import divergence, lifecycle
from rlite.trainer.run.best import EVALUATED, BestModel, Thresholds
from rlite.trainer.run.interruption import INTERRUPTION
from rlite.trainer.run.observer import Console, Observer
from rlite.trainer.run.saved_state import SavedState

T = TypeVar("T")


class Judged(NamedTuple):
    """Evaluations that have ended."""

    metrics: dict[str, float]
    """metrics that are logged"""
    valid: Mapping[str, float]
    """metrics that measure the model, and not its grader; the best model is chosen from them"""
    step: int
    """finished steps of the evaluated weights"""


class TrainerLoop(ABC):
    """The run loop.

        start ──> evaluate what is owed ──> [ batch ──> learn ──> evaluate ──> observe ──> save ]* ──> end

    The order decides what counts, and what is lost if one of them fails:

    - *batch*, *learn*: an error ends the run, and the step never was. A trainer that recovers repeats `learn` from the
      state of the step before. If streamed data cannot be used, the steps before are saved first.
    - *evaluate*: the step counts from here on. An evaluation that fails ends the run before the step is logged, so that
      a resumed run makes the step again. An interruption leaves evaluations to the run that resumes.
    - *observe*: observers log the step, then it is judged (`DivergedError` if too many steps were bad), then callbacks
      are called. An observer's error ends the run; a callback's error ends it after the step was saved.
    - *save*: evaluations that the save cannot meet end first. A checkpoint exists as a whole or not at all: if writing
      fails, the run ends with `CheckpointError`, and the checkpoints before remain.
    - *end*: however the run ends, every observer that has started is closed, and the folder is free again.
    """

    name: ClassVar[str]
    """name of the command"""
    run: TrainingRun
    _owed: Mapping[str, float] = MappingProxyType({})
    """metrics of the evaluations before the first step of this process"""

    def fit(self) -> dict[str, float]:
        """Train to the last step.

        Returns:
            The metrics of the last step.

        Raises:
            StreamedDataError: a row that was read during training cannot be used. The steps before it are saved.
        """
        with self.run:
            self.start()
            metrics = self._evaluate_owed()
            try:
                while not self.run.is_over:
                    with stats_tracker.record_timing("step"), self.run.generating():
                        if (batch := self._next_batch()) is None:
                            break
                        learnt = self._repeated(lambda: self.learn(batch), is_counted=False)
                    metrics = self._finish(learnt)
            except StreamedDataError:
                lifecycle.save_before_bad_data(self.run, self._save_after_evaluations)
                raise
            discard(self.run.folder / EVALUATED)  # an evaluated model that was not the best
            self.run.close()
        return metrics

    # -- what a trainer does -------------------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Build the engines, resume if asked, and open the run."""

    @abstractmethod
    def _next_batch(self) -> TensorDict | None:
        """Return what the next step learns from; None if the data has ended."""

    @abstractmethod
    def learn(self, batch: TensorDict) -> Any:
        """Update the models from a batch, and return what `_finish` takes."""

    @abstractmethod
    def _finish(self, learnt: Any) -> dict[str, float]:
        """End the step by `_end_step`, and return its metrics."""

    @abstractmethod
    def _is_evaluation_due(self, is_saving: bool) -> bool:
        """Return whether there is an evaluation to make, to begin or to await, perhaps before a save."""

    @abstractmethod
    def _evaluate_sets(self) -> Judged:
        """Make what is due. Called until nothing is due."""

    @abstractmethod
    def _save_evaluated(self, folder: Path) -> None:
        """Write the model that was evaluated last into a folder, unless it is there."""

    @abstractmethod
    def _save(self) -> None:
        """Save the run by `run.save`, with the trainer's own state."""

    def _repeated(self, act: Callable[[], T], is_counted: bool = True) -> T:
        """Return the result of an action on the engines. A trainer that recovers repeats it if workers are lost."""
        return act()

    # -- the steps of the loop -----------------------------------------------------------------------------------

    def _end_step(self, batch: TensorDict, metrics_of: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Count a step, evaluate what is due, log the step, and save if that is due.

        Returns the metrics of the step, and of evaluations after it.
        """
        run = self.run
        run.step, run.batch = run.step + 1, batch
        metrics = metrics_of()
        for each in run.observers:
            each.on_train(run, metrics)
        metrics |= self._evaluate_and_judge()
        run.log_step(metrics)
        if run.is_save_due():
            metrics |= self._save_after_evaluations()
        return metrics

    def _evaluate_owed(self) -> dict[str, float]:
        """Return the metrics of evaluations before the first step, or of those that an interruption has left."""
        run = self.run
        was_over = run.is_over
        metrics = self._evaluate_and_judge()
        run.end_if_interrupted()  # the checkpoint owes these evaluations, if there is one
        if metrics:
            run.log_evaluation(metrics)
        # the last step owed them, or a threshold was reached
        if run.step and run.is_over and (metrics or not was_over):
            self._save_after_evaluations()
        self._owed = {**self._owed, **metrics}  # a trainer's `start` may have made them before `fit` asks
        return dict(self._owed)

    def _evaluate_and_judge(self, is_saving: bool = False) -> dict[str, float]:
        """Make or begin the evaluations that are due, and judge the model by those that have ended.

        Returns the newest metrics; older ones are logged.
        """
        metrics: dict[str, float] = {}
        while self._is_evaluation_due(is_saving):
            began = time.perf_counter()
            try:
                with trace.span("evaluate"):
                    found = self._evaluate_sets()
            finally:
                self.run.evaluation_seconds += time.perf_counter() - began
            if metrics.keys() & found.metrics.keys():
                self.run.log_evaluation(self._timed(metrics))
                metrics = {}
            metrics |= found.metrics
            if found.valid:
                self._judge(found.valid, found.step)
        return self._timed(metrics) if metrics else {}

    def _timed(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return metrics of evaluations with `seconds_evaluate`, the time of all evaluations since the last call."""
        seconds, self.run.evaluation_seconds = self.run.evaluation_seconds, 0.0
        return metrics | {"seconds_evaluate": seconds}

    def _judge(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep the model if it is the best so far, and pass its evaluation to callbacks and thresholds."""
        if step:
            self._repeated(lambda: self.run.best.see(step, metrics, self._save_evaluated))
        self.run.evaluated(metrics, is_trained=step > 0)

    def _save_after_evaluations(self) -> dict[str, float]:
        """Save the run, after evaluations that have become due since its last step, or must not meet the checkpoint.

        Returns the metrics of these evaluations.
        """
        if metrics := self._evaluate_and_judge(is_saving=True):
            self.run.log_evaluation(metrics)
        self._repeated(self._save)
        return metrics


class TrainingRun:
    """The state of a run: its step, its metrics, who observes it, and whether it goes on.

    `step` counts finished steps. Callbacks are notified here, for every trainer. The end of a `with` block closes the
    observers, and lets other runs use the folder.

    `resolved`: the trainer's config, which is saved. Its group `trainer` has the options of the run.
    """

    def __init__(
        self, resolved: Any, total_steps: int, has_absolute_loss: bool = False, callbacks: Sequence[Callback] = ()
    ) -> None:
        options: RunOptions = resolved.trainer
        self.options, self.config, self.total_steps = options, resolved, total_steps
        self.callbacks = Callbacks([*options.callbacks, *callbacks])
        self.observers: Sequence[Observer] = ()
        """set before `open`"""
        self.started: list[Observer] = []
        self.saved = SavedState(resolved)
        self.folder = self.saved.folder
        self.console = Console()
        self.step = 0
        self.coefficients: Any = None
        """coefficients that may change during the run, if the trainer has any"""
        self.batch: TensorDict | None = None
        """batch of the last step, as it was trained on"""
        self.metrics: Mapping[str, float] = {}
        self.stop_reason = ""
        """reason, in words, for which the run ends early"""
        self.evaluation_seconds = 0.0
        """time of evaluations that is not logged yet"""
        self.best, self.thresholds = BestModel(options, self.folder), Thresholds(options.stop_at)
        self.watch = DivergenceWatch(options.max_skipped_steps, has_absolute_loss)
        self.is_unconfirmed = True
        self.replaced_best = ""

    # -- in every step -------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """True if no step is left, or if a callback has ended the run."""
        return self.step >= self.total_steps or bool(self.stop_reason) or self.callbacks.failure is not None

    def is_due(self, every: int) -> bool:
        """Return whether an action is due that happens every `every` steps, and at the end."""
        return self.step % every == 0 or self.is_over

    def is_save_due(self) -> bool:
        """Return whether `save` is due: by the options, at the end, or because the run is interrupted."""
        return self.is_due(self.options.save_freq) or self.is_interrupted

    @property
    def is_interrupted(self) -> bool:
        """True if a signal asks the run to save now and to end."""
        return INTERRUPTION.asked is not None

    def log_step(self, metrics: dict[str, float]) -> None:
        """Log the metrics of the step that has just ended."""
        for each in self.observers:
            each.on_step(self, metrics)
        if self.saved.checkpoints.under_way:
            self.saved.checkpoints.look()
        if self.watch.see(metrics):
            if self.is_unconfirmed:
                self.saved.checkpoints.confirm()
                self.is_unconfirmed = False
        elif self.watch.num_bad == 1 or self.watch.has_diverged:
            divergence.alarm(self, metrics)
        self.metrics = metrics
        if self.step:  # what ppo evaluates before its first step is no step
            self.notify("on_step", metrics)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Explain failures of generation inside the `with` block by weights or logits that are not finite.

        Before the first step, and for any other cause, the failure itself is raised.
        """
        try:
            yield
        except (DivergedError, RolloutError) as error:
            divergence.explain(self, error)
            raise

    # -- begin, saves and end ------------------------------------------------------------------------------------

    restore = lifecycle.restore
    open = lifecycle.open_run
    save = lifecycle.save
    close = lifecycle.close
    end_if_interrupted = lifecycle.end_if_interrupted

    # -- for callbacks -------------------------------------------------------------------------------------------

    log = lifecycle.log
    set = lifecycle.set_coefficients
    stop = lifecycle.stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the observers in their order, then the folder."""
        started, self.started = self.started, []
        with ExitStack() as stack:  # calls the last one first, and all of them
            stack.callback(self.saved.held.close)
            for each in reversed(started):
                stack.callback(each.close, self, error)

    # -- events that decide --------------------------------------------------------------------------------------

    evaluated = lifecycle.evaluated

    def log_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Log metrics of an evaluation in a line of their own."""
        for each in self.observers:
            each.on_log(self, metrics)

    def answered(self, step: int, evaluations: Sequence[Any]) -> None:
        """Show observers the evaluations by answers of the weights after `step` steps, with their episodes."""
        for each in self.observers:
            each.on_answers(self, step, evaluations)

    def notify(self, event: Event, metrics: Mapping[str, float]) -> None:
        """Call the callbacks."""
        if self.callbacks.by_name:
            self.callbacks.call(event, self, metrics)


class DivergenceWatch:
    """Decision, from the metrics of each step, whether training still learns.

    `max_bad`: consecutive bad steps after which the run has diverged. Half of the last `4 * max_bad` steps count the
    same: an alternating run learns little, too.
    """

    def __init__(self, max_bad: int, has_absolute_loss: bool = False) -> None:
        self._max = max_bad
        self._explosion = divergence.Explosion() if has_absolute_loss else None
        self._recent: deque[bool] = deque(maxlen=4 * max_bad)
        self.num_bad = 0
        """bad steps in a row, up to the last one"""
        self.cause = ""
        """why the last step was bad; empty if it was not"""

    def see(self, metrics: Mapping[str, float]) -> bool:
        """Return True if this step was a good one, as far as the metrics show."""
        is_finite = all(math.isfinite(metrics[key]) for key in divergence.WATCHED if key in metrics)
        self.cause = "" if is_finite else divergence.NOT_FINITE
        if is_finite and self._explosion is not None:
            self.cause = self._explosion(metrics)
        self._recent.append(bool(self.cause))
        self.num_bad = self.num_bad + 1 if self.cause else 0
        return not self.cause

    @property
    def has_diverged(self) -> bool:
        """True if too many steps were bad."""
        return self.num_bad >= self._max or sum(self._recent) >= 2 * self._max

    def describe(self) -> str:
        """Return how many steps were bad, as text."""
        return f"{self.num_bad} in a row, {sum(self._recent)} of the last {len(self._recent)}"


def loss_stats(stats: Mapping[str, float]) -> dict[str, float]:
    """Return the statistics of an update as metrics: an engine's `weight` is called `loss_weight`."""
    return {"loss_weight" if key == "weight" else key: value for key, value in stats.items()}


def step_metrics(batch: TensorDict) -> dict[str, float]:
    """Return the metrics that `stats_tracker` gathered in this step, and tokens per second.

    Timings are called "seconds_PHASE", and "seconds" for the whole step.
    """
    renamed = {key.replace("timeperf/", "seconds_"): value for key, value in stats_tracker.export().items()}
    metrics = {"seconds" if key == "seconds_step" else key: value for key, value in renamed.items()}
    if "seconds" in metrics:
        metrics["tokens_per_second"] = sum(sequence_lengths(batch)) / metrics["seconds"]
    return metrics
