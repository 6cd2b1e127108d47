"""The begin, the saves and the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlite.engine.train import RliteTrainEngine
from rlite.observability import stats_tracker, trace
from rlite.trainer.callbacks import Callbacks
from rlite.trainer.run.divergence import raise_diverged
from rlite.trainer.run.interruption import INTERRUPTION

if TYPE_CHECKING:
    from rlite.trainer.run.training_run import TrainingRun


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
