"""The begin, the saves and the end of a run, and what becomes of a run that diverges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from rlite.engine.train import RliteTrainEngine
from rlite.errors import DivergedError, NonFiniteError, RolloutError
from rlite.observability import stats_tracker, trace
from rlite.trainer.callbacks import Callbacks
from rlite.trainer.run.interruption import INTERRUPTION

if TYPE_CHECKING:
    from rlite.trainer.run.training_run import TrainingRun

EXPLOSION = 10.0
"""times the first loss (at least 1) beyond which a loss has exploded"""
WATCHED = ("loss", "grad_norm", "critic/loss", "critic/grad_norm")
NOT_FINITE = "the loss or the gradients are not finite, the weights are"


def restore(run: TrainingRun, engine: RliteTrainEngine, others: Mapping[str, RliteTrainEngine]) -> dict[str, Any]:
    """Do what `TrainingRun.restore` says.

    Args:
        run: the run.
        engine: engine of the main model.
        others: further engines, by name.

    Returns:
        The facts that were saved.
    """
    facts = run.saved.restore(engine, others)
    run.step = facts.get("step", 0)
    run.replaced_best = run.best.restore() if facts and not run.saved.begins_empty else ""
    run.thresholds.latest = facts.get("evaluated", {})
    has_same_callbacks = run.callbacks.load_state_dict(facts.get("callbacks", {}))
    if has_same_callbacks and facts.get("stop_at", {}) == run.options.stop_at:  # else the run goes on
        run.stop_reason = facts.get("stopped", "")
    return facts


def open_run(run: TrainingRun) -> None:
    """Do what `TrainingRun.open` says."""
    stats_tracker.export()  # a run that was stopped in a step may have left what belongs to no step of this one
    run.saved.open()
    for each in run.observers:
        each.on_start(run, {})
        run.started.append(each)
    if run.replaced_best:
        run.console.warn("the best model is chosen anew", {"reason": run.replaced_best})
    INTERRUPTION.begin(f"{run.saved.way_on} goes on from the newest checkpoint, or starts over if there is none.")
    if run.is_over:
        run.callbacks = Callbacks(())  # they were notified when the run ended
    run.notify("on_start", {})
    if run.callbacks.failure is not None:
        run.close()


def save(run: TrainingRun, kept: Mapping[str, Any] | None, facts: Mapping[str, Any]) -> None:
    """Do what `TrainingRun.save` says.

    Args:
        run: the run.
        kept: plain values and tensors that `restore` returns.
        facts: further values that `restore` returns.
    """
    is_suspect = run.watch.num_bad > 0
    if not is_suspect and (damage := run.saved.nonfinite_weights()):
        raise_diverged(run, damage)
    for each in run.observers:
        each.before_save(run)
    with trace.span("checkpoint", step=run.step):
        # in this order: a run that is killed in between makes these steps again, and then both
        if not is_suspect:
            run.saved.write_models()
        if not is_suspect or (run.is_over and run.callbacks.failure is None):
            own = {
                "stopped": run.stop_reason,
                "evaluated": run.thresholds.latest,
                "stop_at": run.options.stop_at,
                "callbacks": run.callbacks.state_dict(),
            }
            run.saved.write_state(run.step, {**own, **facts}, kept)
            run.is_unconfirmed = True
    if not is_suspect:
        for each in run.observers:
            each.on_save(run, run.metrics)
        run.notify("on_save", run.metrics)
    saved = f"Step {run.step} is saved. {run.saved.way_on} goes on from there."
    run.end_if_interrupted("" if is_suspect else saved)


def close(run: TrainingRun) -> None:
    """Do what `TrainingRun.close` says.

    Args:
        run: the run.

    Raises:
        errors: the error of a callback that raised one, if it ended the run.
    """
    try:
        with run:
            run.saved.checkpoints.finish()
            if run.watch.num_bad and not run.is_interrupted and run.callbacks.failure is None:
                raise_diverged(run, f"the last steps were bad: {run.watch.cause}")
            run.saved.checkpoints.confirm()
            run.notify("on_end", run.metrics)
            if run.callbacks.failure is not None:
                raise run.callbacks.failure
    finally:
        INTERRUPTION.end()


def alarm(run: TrainingRun, metrics: Mapping[str, float]) -> None:
    """Report the first of several bad steps.

    Args:
        run: the run.
        metrics: metrics of the step.

    Raises:
        DivergedError: there were too many bad steps, or the weights are not finite.
    """
    damage = run.saved.nonfinite_weights()
    cause = damage or run.watch.cause
    if damage or run.watch.has_diverged:
        raise_diverged(run, cause)
    values = ", ".join(f"{key} {metrics[key]}" for key in WATCHED if key in metrics)
    remedy = "look at the data and the loss" if run.step <= 1 else "a lower lr is the usual remedy"
    what = "an update was skipped" if run.watch.cause == NOT_FINITE else "training diverges"
    steps = f"trainer.max_skipped_steps={run.options.max_skipped_steps} such steps in a row"
    end = f"no checkpoint is written until a step is good, and the run stops after {steps}"
    rows = {"cause": f"{cause} ({values}); {remedy}", "from here": end}
    run.console.alarm(f"ALARM at step {run.step}: {what}", rows)


def raise_diverged(run: TrainingRun, cause: str, source: BaseException | None = None) -> NoReturn:
    """End the run with an error. `latest` now ignores checkpoints that no good step followed.

    Args:
        run: the run.
        cause: why it has diverged.
        source: exception behind the cause.

    Raises:
        DivergedError: always.
    """
    aside, good = run.saved.checkpoints.set_aside()
    bad = "an earlier one, if the metrics were bad before"
    way = f"Resume with trainer.load_ckpt_from={good} (or {bad}), and" if good else "Start over"
    moved = f" {aside[-1]} is set aside, because no step after it was good." if aside else ""
    raise DivergedError(
        f"training diverged at step {run.step}: {cause}. Bad steps: {run.watch.describe()}.{moved} "
        f"{way} with a lower lr or max_grad_norm, or look at the data and the loss"
    ) from source


def explain(run: TrainingRun, error: DivergedError | RolloutError) -> None:
    """End a run whose generation failed because its weights or logits are not finite; do nothing for another cause.

    Args:
        run: the run.
        error: failure of the generation.
    """
    failure = error if isinstance(error, DivergedError) else error.__cause__
    is_named = isinstance(failure, DivergedError | NonFiniteError)
    cause = str(failure) if is_named else run.saved.nonfinite_weights()
    if cause and run.step:
        raise_diverged(run, cause, error)


class Explosion:
    """Decision whether losses that can be compared, as in supervised training, show that training no longer learns."""

    def __init__(self) -> None:
        self._first_loss: float | None = None

    def __call__(self, metrics: Mapping[str, float]) -> str:
        """Return how a finite loss shows it; an empty text if it does not."""
        if not {"loss", "grad_norm"} <= metrics.keys():
            return ""
        loss = metrics["loss"]
        if self._first_loss is None:
            self._first_loss = loss
        if loss > EXPLOSION * max(self._first_loss, 1.0):
            return f"the loss is more than {EXPLOSION:g} times that of the first step, {self._first_loss:.3g}"
        if metrics["grad_norm"] == 0 and loss > 0.9 * self._first_loss:
            return "the gradient is 0, and the loss is not below that of the first step"
        return ""


def save_before_bad_data(run: TrainingRun, save: Callable[[], object]) -> None:
    """Save the finished steps of a run that ends because streamed data cannot be used.

    Args:
        run: the run.
        save: saves it.
    """
    if not run.step:
        return
    if not run.is_save_due():  # else it is saved already
        save()
    run.saved.checkpoints.finish()
    way = f"repair the data. {run.saved.way_on} goes on from there, if the rows before are the same"
    run.console.alarm(f"bad data: stop after step {run.step}, which is saved", {"to go on": way})
