"""The begin, the saves and the end of a run, and what callbacks may do, as methods of `TrainingRun`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlite.engine.train import RliteTrainEngine
from rlite.errors import ConfigError
from rlite.observability import stats_tracker, trace
from rlite.trainer.callbacks import Callbacks
from rlite.trainer.run.divergence import raise_diverged
from rlite.trainer.run.interruption import INTERRUPTION

if TYPE_CHECKING:
    from rlite.trainer.run.training_run import TrainingRun


def restore(run: TrainingRun, /, engine: RliteTrainEngine, **others: RliteTrainEngine) -> dict[str, Any]:
    """Take the engines that this run saves, and load the checkpoint to resume from into them.

    `engine`: the engine of the main model. Its weights go into latest/. `**others`: further engines. Their weights go
    into NAME_latest/. Returns the facts that were saved; {} for a new run. See `SavedState.restore` for what it raises.
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
    """Write the resolved config, and start the observers and the callbacks.

    From here to `close`, Ctrl-C and SIGTERM wait for the end of the step.
    """
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


def save(run: TrainingRun, /, kept: Mapping[str, Any] | None = None, **facts: Any) -> None:
    """Write latest/ for other programs, and state/step-N to resume from. An interrupted run ends here.

    After a skipped update nothing is written, except for the state at the very end. This state replaces no other state.

    `**facts`: further values that `restore` returns. They must be representable in JSON.
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
    """Wait for the last checkpoint, notify the callbacks, then close the observers."""
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


def end_if_interrupted(run: TrainingRun, /, advice: str = "") -> None:
    """End the run if a signal asks for it. What is not saved is lost.

    `advice`: how to continue; "" if nothing new can be said.
    """
    if run.is_interrupted:
        run.close()
        INTERRUPTION.advice = advice or INTERRUPTION.advice
        INTERRUPTION.obey()


def stop(run: TrainingRun, /, reason: str) -> None:
    """End the run after this step, with a checkpoint. The same command does not go on after it.

    `reason`: cause, in words, for the console and for the checkpoint; not empty.
    """
    if not run.stop_reason:
        run.stop_reason = reason
        run.console.warn(f"stop after step {run.step} of {run.total_steps}", {"reason": reason})


def evaluated(run: TrainingRun, /, metrics: Mapping[str, float], is_trained: bool = True) -> None:
    """Notify the callbacks of an evaluation, and stop if a trained model reaches `stop_at`."""
    run.notify("on_evaluate", metrics)
    if is_trained and (reason := run.thresholds.see(metrics)):
        run.stop(reason)


def log(run: TrainingRun, /, metrics: Mapping[str, float]) -> None:
    """Log numbers of a callback with the last finished step, in a line of their own."""
    numbers = {str(name): float(value) for name, value in metrics.items()}
    for each in run.observers:
        each.on_added(run, numbers)


def set_coefficients(run: TrainingRun, /, **values: float) -> None:
    """Change coefficients from the next step on, in place of their options and schedules."""
    if run.coefficients is None:
        raise ConfigError("run.set: this trainer has no coefficients that change; ppo, grpo and distill have some")
    if "jsonl" not in run.options.sinks:
        raise ConfigError("run.set: metrics.jsonl records what a callback sets; add jsonl to trainer.sinks")
    run.coefficients.choose(values)


def save_before_bad_data(run: TrainingRun, save: Callable[[], object]) -> None:
    """Save the finished steps of a run that ends because streamed data cannot be used."""
    if not run.step:
        return
    if not run.is_save_due():  # else it is saved already
        save()
    run.saved.checkpoints.finish()
    way = f"repair the data. {run.saved.way_on} goes on from there, if the rows before are the same"
    run.console.alarm(f"bad data: stop after step {run.step}, which is saved", {"to go on": way})
