"""Keep a picture of the learning curve in the folder of the run: learning_curve.png. Needs matplotlib (`rlite[plot]`).

    rlite ppo --import examples/callbacks/learning_curve.py trainer.callbacks=[learning_curve] ...

In Python, with metrics of your choice:

    PpoTrainer(options, workflow, rows, callbacks=[LearningCurve("reward", "response_length")]).fit()
"""

from __future__ import annotations

from typing import Any

from rlite.services.console.plots import plot_learning_curve
from rlite.trainer.callbacks import Callback, register_callback

USUAL = ("reward", "loss", "accuracy", "test_loss", "test_accuracy")


@register_callback("learning_curve")
class LearningCurve(Callback):
    """Draws metrics when a checkpoint is written: the named metrics, or the usual metrics that the trainer has."""

    def __init__(self, *metrics: str) -> None:
        self.metrics = metrics

    def on_save(self, run: Any, metrics: Any) -> None:
        chosen = self.metrics or [name for name in USUAL if name in metrics]
        title = f"{run.config.trainer.run_name}, step {run.step}"
        plot_learning_curve(run.folder / "metrics.jsonl", run.folder / "learning_curve.png", chosen, title=title)
