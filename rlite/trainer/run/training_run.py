"""Manage a trainer's run around its loop: the folder, metrics, checkpoints, resume.

The time at which a run started: the date that its chat template writes, today and after every resume.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rlite import config
from rlite.data.chat.template import CLOCK
from rlite.engine.train import RliteTrainEngine
from rlite.errors import CheckpointError, ConfigError, DivergedError, NonFiniteError, StorageError, why_not_written
from rlite.observability import stats_tracker, trace
from rlite.rollout.workflow import RolloutError
from rlite.runtime.cluster.session import at_shutdown
from rlite.runtime.storage.atomic import FACTS
from rlite.services.console.sinks.base import Run, open_sinks
from rlite.services.record.files import drop_later
from rlite.services.recovery import reporting
from rlite.trainer.callbacks import Callback, Callbacks, Event
from rlite.trainer.options import RunOptions
from rlite.trainer.run.best import BestModel, EvaluationTime, Thresholds
from rlite.trainer.run.checkpoints import Checkpoints, steps_of
from rlite.trainer.run.divergence import NOT_FINITE, WATCHED, DivergenceWatch
from rlite.trainer.run.folder import CONFIG, NEWEST, TRACE, begins_anew, checkpoint_to_load, clear, lock
from rlite.trainer.run.interruption import INTERRUPTION
from rlite.trainer.run.report import ReportedMetrics, RunReport, usage_metrics

STARTED = "started"
"""fact of a checkpoint: the time at which its run started"""


def wanted_checkpoint(resolved: Any) -> str | None:
    """Return the checkpoint to resume from: a path, "latest" or "latest_good"; None for a new run.

    Args:
        resolved: the trainer's config.

    Raises:
        ConfigError: the folder holds another run.
    """
    options = resolved.trainer
    overwrites = options.overwrite and not reporting.has_begun()
    folder = Path(options.save_dir)
    return checkpoint_to_load(folder, options.load_ckpt_from, overwrites, config.to_container(resolved))


def started_at(resolved: Any) -> datetime:
    """Return the time at which the run started that is resumed, else the present.

    Args:
        resolved: the trainer's config. Its group `trainer` has the options of the run.

    Raises:
        ConfigError: the folder holds another run.
    """
    wanted = wanted_checkpoint(resolved)
    if wanted is None:
        return datetime.now()
    steps = steps_of(Path(resolved.trainer.save_dir) / "state")
    found = [path for _, path in sorted(steps.items(), reverse=True)] if wanted in NEWEST else [Path(wanted)]
    for path in found:  # a damaged one is reported when it is loaded
        with suppress(OSError, ValueError, KeyError):
            return datetime.fromisoformat(json.loads((path / FACTS).read_text())[STARTED])
        with suppress(OSError):  # an earlier version has not saved the time: it wrote this file when it started
            return datetime.fromtimestamp((path.parent.parent / CONFIG).stat().st_mtime)
    return datetime.now()


logger = logging.getLogger(__name__)


class StepTrace:
    """Starts and stops the trace of a run. A trace that cannot be written costs a warning.

    Args:
        options: `trace` and `trace_steps`.
        folder: the run's folder.
    """

    def __init__(self, options: RunOptions, folder: Path) -> None:
        self._is_wanted, self._path = options.trace, folder / TRACE
        self._first, self._last = options.trace_steps or (1, sys.maxsize)

    def follow(self, step: int, is_over: bool) -> None:
        """Trace the next step if the options say so, and write the trace of the last step.

        Args:
            step: finished steps.
            is_over: no step is left. The trace of a run that was over before is kept.
        """
        if not self._is_wanted or (is_over and not trace.is_on()):
            return
        if step >= self._last:
            trace.stop()
        elif step + 1 >= self._first and not trace.is_on():
            self._start()
        trace.flush()

    def _start(self) -> None:
        try:
            trace.start(self._path)
        except StorageError as error:  # no trace is worth a run
            logger.warning("this run is not traced: %s", error)
            self._is_wanted = False

    def close(self) -> None:
        """End the trace, if the options ask for one."""
        if self._is_wanted:
            trace.stop()


class TrainingRun:
    """The folder of a run: checkpoints, metrics, and the step from which a resumed run continues.

    `step` counts finished steps. Callbacks are notified here, for every trainer.

    Args:
        resolved: the trainer's config, which is saved. Its group `trainer` has the options of the run.
        reported: metrics for the console and for the report at the end.
        total_steps: number of steps of the whole run.
        has_absolute_loss: whether the size of the loss indicates divergence.
        callbacks: callbacks besides the callbacks that the config names.

    Raises:
        ConfigError: the folder holds another run, or an object is not a callback.
        CallbackError: a callback could not be made.
    """

    def __init__(
        self,
        resolved: Any,
        reported: ReportedMetrics,
        total_steps: int,
        has_absolute_loss: bool = False,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._options: RunOptions = resolved.trainer
        options, self.folder = self._options, Path(self._options.save_dir)
        self._report, self._trace = RunReport(options, reported), StepTrace(options, self.folder)
        self.total_steps = total_steps
        self.config = resolved
        self._kind = type(resolved).__name__
        self.step = 0
        self._callbacks = Callbacks([*options.callbacks, *callbacks])
        self._metrics: Mapping[str, float] = {}
        self._stop_reason = ""
        self._replaced_best = ""
        self.evaluation_time = EvaluationTime()
        self._best, self._thresholds = BestModel(options, self.folder), Thresholds(options.stop_at)
        self._watch = DivergenceWatch(options.max_skipped_steps, has_absolute_loss)
        self._overwrites = options.overwrite and not reporting.has_begun()
        self._started = CLOCK.now()
        self.held = ExitStack()
        """holds the folder, from `restore` to the end of its `with` block at the latest"""
        self._checkpoints = self._find_checkpoints()

    def _find_checkpoints(self) -> Checkpoints:
        options, wanted = self._options, wanted_checkpoint(self.config)
        return Checkpoints(self.folder / "state", options.keep, wanted, is_asynchronous=options.save_async)

    def restore(self, engine: RliteTrainEngine, **others: RliteTrainEngine) -> dict[str, Any]:
        """Lock the folder, take the engines that this run saves, and load the checkpoint to resume from into them.

        Args:
            engine: the engine of the main model. Its weights go into latest/.
            **others: further engines. Their weights go into NAME_latest/.

        Returns:
            The facts that were saved; {} for a new run.

        Raises:
            CheckpointError: the checkpoint cannot be loaded, belongs to another trainer, or holds weights that are not
                finite.
            CallbackError: a callback does not take its state.
            ConfigError: the folder cannot be written to, or another run is under way there.
        """
        self._engine, self._others = engine, others
        with self._writing():
            self.held.callback(lock(self.folder).close)
        at_shutdown(self.held.close)  # for a trainer whose loop is not `fit`
        self._checkpoints = self._find_checkpoints()  # another run may have gone on since
        facts = self._checkpoints.restore(engine, others)
        if facts and (damage := self._nonfinite_weights()):
            raise CheckpointError(f"{self._checkpoints.found}: {damage}; resume from an earlier one")
        if facts and facts.get("config", self._kind) != self._kind:
            raise CheckpointError(
                f"{self._checkpoints.found}: saved by a run of {facts['config']}, and this one is of {self._kind}: "
                "another trainer begins from the weights in latest/"
            )
        self.step = facts.get("step", 0)
        self._replaced_best = self._best.restore() if facts and not self._begins_empty else ""
        self._thresholds.latest = facts.get("evaluated", {})
        has_same_callbacks = self._callbacks.load_state_dict(facts.get("callbacks", {}))
        if has_same_callbacks and facts.get("stop_at", {}) == self._options.stop_at:  # else the run goes on
            self._stop_reason = facts.get("stopped", "")
        return facts

    def open(self) -> None:
        """Write the resolved config, and open the metric sinks.

        The sinks drop the lines that a resumed run writes again. From here to `close`, Ctrl-C and SIGTERM wait for the
        end of the step.

        Raises:
            ConfigError: the folder cannot be written to.
            CallbackError: a callback raised an exception.
        """
        stats_tracker.export()  # a run that was stopped in a step may have left what belongs to no step of this one
        with self._writing():
            if self._begins_empty:
                clear(self.folder)
            if self._checkpoints.found is not None:
                self._checkpoints.clear_leftovers()  # a resumed run that is finished already saves nothing itself
            config.save(self.config, self.folder / "config.yaml")
        options = self._options
        self._sinks = open_sinks(
            options.all_sinks,
            Run(
                directory=self.folder,
                project=options.project,
                name=options.experiment_name,
                config=config.to_container(self.config),
                resume_after=self.step or -1,  # what stands at step 0 is of another run
            ),
        )
        drop_later(self.folder, self.step or -1)
        self.console = self._report.open(self.total_steps, self.step)
        self._trace.follow(self.step, self.is_over)
        if (found := self._checkpoints.found) is not None:
            self._report.resumed(self.step, self.total_steps, found, self._stop_reason)
        if self._replaced_best:
            self.console.warn("the best model is chosen anew", {"reason": self._replaced_best})
        reporting.report_step(self.step, self.total_steps)
        INTERRUPTION.begin(f"{self._way_on()} goes on from the newest checkpoint, or starts over if there is none.")
        if self.is_over:
            self._callbacks = Callbacks(())  # they were notified when the run ended
        self._notify("on_start", {})
        if self._callbacks.failure is not None:
            self.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"trainer.save_dir={self.folder}: cannot be written to: {why_not_written(error)}"
            ) from error

    def show_plan(self, title: str, plan: Callable[[], Mapping[str, str]]) -> None:
        """Report how the work is divided, if there is work left.

        Args:
            title: title of the report.
            plan: returns the plan, as text by topic.
        """
        if not self.is_over:
            self.console.report(title, plan())

    @property
    def oldest_checkpoint(self) -> int | None:
        """Step of the oldest checkpoint from which the run can be resumed; None if there is none."""
        return self._checkpoints.oldest

    @property
    def is_over(self) -> bool:
        """True if no step is left, or if a callback has ended the run."""
        return self.step >= self.total_steps or bool(self._stop_reason) or self._callbacks.failure is not None

    def stop(self, reason: str) -> None:
        """End the run after this step, with a checkpoint. The same command does not go on after it.

        Args:
            reason: cause, in words, for the console and for the checkpoint; not empty.
        """
        if not self._stop_reason:
            self._stop_reason = reason
            self.console.warn(f"stop after step {self.step} of {self.total_steps}", {"reason": reason})

    def _way_on(self) -> str:
        """Return the name of the command that resumes this run."""
        return "The same command without trainer.overwrite=true" if self._begins_empty else "The same command"

    @property
    def _begins_empty(self) -> bool:
        """True if what the folder holds is deleted first."""
        return self._overwrites and begins_anew(self.folder, self._options.load_ckpt_from)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics of the step that has just ended.

        Args:
            metrics: values by name.

        Raises:
            CheckpointError: the last checkpoint could not be written in the background.
            DivergedError: too many steps were bad.
        """
        self._sinks.log(self.step, metrics)
        self._report.log(self.step, metrics)
        reporting.report_step(self.step, self.total_steps)
        self._checkpoints.look()
        self._trace.follow(self.step, self.is_over)
        if self._watch.see(metrics):
            self._checkpoints.confirm()
        elif self._watch.num_bad == 1 or self._watch.has_diverged:
            self._alarm(metrics)
        self._metrics = metrics
        if self.step:  # what ppo evaluates before its first step is no step
            self._notify("on_step", metrics)

    def evaluated(self, metrics: Mapping[str, float], is_trained: bool = True) -> None:
        """Notify the callbacks of an evaluation, and stop if a trained model reaches `stop_at`.

        Args:
            metrics: metrics of the evaluation.
            is_trained: whether the evaluated model has been trained.
        """
        self._notify("on_evaluate", metrics)
        if is_trained and (reason := self._thresholds.see(metrics)):
            self.stop(reason)

    def _notify(self, event: Event, metrics: Mapping[str, float]) -> None:
        """Call the callbacks, and log the metrics that they add."""
        if added := self._callbacks.call(event, self, metrics):
            self._sinks.log(self.step, added)

    def log_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Log metrics of an evaluation in a line of their own."""
        self._sinks.log(self.step, metrics)
        self._report.log(self.step, metrics)

    def _alarm(self, metrics: Mapping[str, float]) -> None:
        """Report the first of several bad steps.

        Raises:
            DivergedError: there were too many bad steps, or the weights are not finite.
        """
        damage = self._nonfinite_weights()
        cause = damage or self._watch.cause
        if damage or self._watch.has_diverged:
            raise self._diverged(cause)
        values = ", ".join(f"{key} {metrics[key]}" for key in WATCHED if key in metrics)
        remedy = "look at the data and the loss" if self.step <= 1 else "a lower lr is the usual remedy"
        self.console.alarm(
            f"ALARM at step {self.step}: "
            + ("an update was skipped" if self._watch.cause == NOT_FINITE else "training diverges"),
            {
                "cause": f"{cause} ({values}); {remedy}",
                "from here": f"no checkpoint is written until a step is good, and the run stops after "
                f"trainer.max_skipped_steps={self._options.max_skipped_steps} such steps in a row",
            },
        )

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Explain failures of generation inside the `with` block by weights or logits that are not finite.

        Before the first step, and for any other cause, the failure itself is raised.

        Yields:
            None.

        Raises:
            DivergedError: generation failed because the trained weights, or their logits, are not finite.
            RolloutError: generation failed for another cause.
        """
        try:
            yield
        except (DivergedError, RolloutError) as error:
            failure = error if isinstance(error, DivergedError) else error.__cause__
            is_named = isinstance(failure, DivergedError | NonFiniteError)
            cause = str(failure) if is_named else self._nonfinite_weights()
            if not cause or not self.step:
                raise
            raise self._diverged(cause) from error

    def _diverged(self, cause: str) -> DivergedError:
        """Return the error that ends the run. `latest` now ignores checkpoints that no good step followed."""
        aside, good = self._checkpoints.set_aside()
        bad = "an earlier one, if the metrics were bad before"
        way = f"Resume with trainer.load_ckpt_from={good} (or {bad}), and" if good else "Start over"
        moved = f" {aside[-1]} is set aside, because no step after it was good." if aside else ""
        return DivergedError(
            f"training diverged at step {self.step}: {cause}. Bad steps: {self._watch.describe()}.{moved} "
            f"{way} with a lower lr or max_grad_norm, or look at the data and the loss"
        )

    def _nonfinite_weights(self) -> str:
        """Return the names of weights that are not finite, as text; "" if all are finite."""
        engines = {"model": self._engine, **self._others}
        found = {key: engine.nonfinite_parameters() for key, engine in engines.items()}
        return "; ".join(
            f"weights hold NaN or infinity: {key} {', '.join(names[:3])}{', ...' if names[3:] else ''}"
            for key, names in found.items()
            if names
        )

    def is_due(self, every: int) -> bool:
        """Return whether an action is due that happens every `every` steps, and at the end."""
        return self.step % every == 0 or self.is_over

    def is_save_due(self) -> bool:
        """Return whether `save` is due: by the options, at the end, or because the run is interrupted."""
        return self.is_due(self._options.save_freq) or self.is_interrupted

    @property
    def is_interrupted(self) -> bool:
        """True if a signal asks the run to save now and to end."""
        return INTERRUPTION.is_asked

    def save(self, kept: Mapping[str, Any] | None = None, **facts: Any) -> None:
        """Write latest/ for other programs, and state/step-N to resume from. An interrupted run ends here.

        After a skipped update nothing is written, except for the state at the very end. This state replaces no other
        state.

        Args:
            kept: plain values and tensors that `restore` returns.
            **facts: further values that `restore` returns. They must be representable in JSON.

        Raises:
            DivergedError: the weights are not finite. Nothing is written.
            KeyboardInterrupt: the run was interrupted, and its checkpoint is written.
        """
        is_suspect = self._watch.num_bad > 0
        if not is_suspect and (damage := self._nonfinite_weights()):
            raise self._diverged(damage)
        with trace.span("checkpoint", step=self.step):
            # in this order: a run that is killed in between makes these steps again, and then both
            if not is_suspect:
                for name, other in self._others.items():
                    other.save(self.folder / f"{name}_latest")
                self._engine.save(self.folder / "latest")
            if not is_suspect or (self.is_over and self._callbacks.failure is None):
                own = {
                    "config": self._kind,
                    STARTED: self._started.isoformat(),
                    "stopped": self._stop_reason,
                    "evaluated": self._thresholds.latest,
                    "stop_at": self._options.stop_at,
                }
                facts = {**own, "callbacks": self._callbacks.state_dict(), **facts}
                self._checkpoints.save(self.step, self._engine, self._others, facts, kept)
        if not is_suspect:
            self._notify("on_save", self._metrics)
        saved = f"Step {self.step} is saved. {self._way_on()} goes on from there."
        self.end_if_interrupted("" if is_suspect else saved)

    def end_if_interrupted(self, advice: str = "") -> None:
        """End the run if a signal asks for it. What is not saved is lost.

        Args:
            advice: how to continue; "" if nothing new can be said.

        Raises:
            KeyboardInterrupt: the run was interrupted.
        """
        if self.is_interrupted:
            self.close()
            INTERRUPTION.advice = advice or INTERRUPTION.advice
            INTERRUPTION.obey()

    def save_before_bad_data(self, save: Callable[[], None]) -> None:
        """Save the finished steps of a run that ends because streamed data cannot be used.

        Args:
            save: saves the run.
        """
        if not self.step:
            return
        if not self.is_save_due():  # else it is saved already
            save()
        self._checkpoints.finish()
        way = f"repair the data. {self._way_on()} goes on from there, if the rows before are the same"
        self.console.alarm(f"bad data: stop after step {self.step}, which is saved", {"to go on": way})

    def save_best(
        self, metrics: Mapping[str, float], save: Callable[[Path], None] | None = None, step: int | None = None
    ) -> None:
        """Write best/ if this evaluation is the best so far. A missing best_metric only logs a warning.

        Args:
            metrics: metrics of the evaluation.
            save: writes the evaluated model into a folder, unless it is there; default: the model as it is now.
            step: step of the evaluated weights; default: now.
        """
        self._best.see(self.step if step is None else step, metrics, save or self._engine.save)

    def close(self) -> None:
        """Wait for the last checkpoint, notify the callbacks, then close the sinks and the progress bar.

        Raises:
            CheckpointError: the last checkpoint could not be written.
            DivergedError: the last steps were bad.
            errors: the error of a callback that raised one, if it ended the run.
        """
        try:
            self._checkpoints.finish()
            if self._watch.num_bad and not self.is_interrupted and self._callbacks.failure is None:
                raise self._diverged(f"the last steps were bad: {self._watch.cause}")
            self._checkpoints.confirm()
            self._notify("on_end", self._metrics)
            if self._callbacks.failure is not None:
                raise self._callbacks.failure
        finally:
            self._trace.close()
            self._sinks.close()
            self.console.close()
            self.held.close()
            INTERRUPTION.end()
        how = "interrupted" if self.is_interrupted else "stopped" if self._stop_reason else "finished"
        reason = f": {self._stop_reason}" if how == "stopped" else ""
        self._report.end(f"{how} after step {self.step} of {self.total_steps}{reason}", self._best.describe())


def loss_stats(stats: Mapping[str, float]) -> dict[str, float]:
    """Return the statistics of an update as metrics: an engine's `weight` is called `loss_weight`."""
    return {"loss_weight" if key == "weight" else key: value for key, value in stats.items()}


def step_metrics(engine: RliteTrainEngine, lengths: Sequence[int], is_trained: bool = True) -> dict[str, float]:
    """Return the metrics that `stats_tracker` gathered in this step, tokens per second, peak memory and MFU.

    Timings are called "seconds_PHASE", and "seconds" for the whole step.

    Args:
        engine: the engine that is trained.
        lengths: number of tokens of each sequence of the step.
        is_trained: whether the step has updated the weights.
    """
    usage = engine.device_usage()  # if it fails, the statistics are still there for another call
    renamed = {key.replace("timeperf/", "seconds_"): value for key, value in stats_tracker.export().items()}
    metrics = {"seconds" if key == "seconds_step" else key: value for key, value in renamed.items()}
    if "seconds" in metrics:
        metrics["tokens_per_second"] = sum(lengths) / metrics["seconds"]
    trained = lengths if is_trained else []
    return metrics | usage_metrics(usage, engine.module, trained, metrics.get("seconds_update", 0.0))
