"""Divergence: what a run does when its loss explodes, or when losses, gradients or weights are no longer finite.

`DivergenceWatch` of `training_run.py` judges each step. Here are its signs, the alarm, and the end of a diverged run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from rlite.errors import DivergedError, NonFiniteError, RolloutError

if TYPE_CHECKING:
    from rlite.trainer.run.training_run import TrainingRun

EXPLOSION = 10.0
"""times the first loss (at least 1) beyond which a loss has exploded"""
WATCHED = ("loss", "grad_norm", "critic/loss", "critic/grad_norm")
NOT_FINITE = "the loss or the gradients are not finite, the weights are"


def alarm(run: TrainingRun, metrics: Mapping[str, float]) -> None:
    """Report the first of several bad steps."""
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
    """End the run with an error. `latest` now ignores checkpoints that no good step followed."""
    aside, good = run.saved.checkpoints.set_aside()
    bad = "an earlier one, if the metrics were bad before"
    way = f"Resume with trainer.load_ckpt_from={good} (or {bad}), and" if good else "Start over"
    moved = f" {aside[-1]} is set aside, because no step after it was good." if aside else ""
    raise DivergedError(
        f"training diverged at step {run.step}: {cause}. Bad steps: {run.watch.describe()}.{moved} "
        f"{way} with a lower lr or max_grad_norm, or look at the data and the loss"
    ) from source


def explain(run: TrainingRun, error: DivergedError | RolloutError) -> None:
    """End a run whose generation failed because its weights or logits are not finite; do nothing for another cause."""
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
