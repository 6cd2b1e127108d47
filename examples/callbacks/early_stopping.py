"""Stop a run whose evaluation no longer improves. Its last checkpoint stays, and best/ holds the best model.

    rlite sft --import examples/callbacks/early_stopping.py trainer.callbacks=[early_stopping] \\
        actor.model_name=MODEL data.path=rows.jsonl test_data.path=held_out.jsonl \\
        trainer.n_epochs=20 trainer.test_freq=10 trainer.best_metric=test_loss

`early_stopping_accuracy` watches the accuracy of `rlite ppo` in the same way. In Python:

    SftTrainer(options, rows, held_out, callbacks=[EarlyStopping("test_loss", patience=5)]).fit()
"""

from __future__ import annotations

from typing import Any

from rlite.errors import ConfigError
from rlite.trainer.callbacks import Callback, register_callback


@register_callback("early_stopping")
class EarlyStopping(Callback):
    """Stops after `patience` evaluations in a row without a better value of `metric`."""

    def __init__(self, metric: str = "test_loss", patience: int = 3, is_highest: bool = False) -> None:
        self.metric, self.patience, self.is_highest = metric, patience, is_highest
        self.best: float | None = None
        self.num_worse = 0

    def on_evaluate(self, run: Any, metrics: Any) -> None:
        if self.metric not in metrics:
            raise ConfigError(f"{self.metric!r} is no metric of the evaluation; it has {', '.join(sorted(metrics))}")
        value = metrics[self.metric]
        is_better = self.best is None or (value > self.best if self.is_highest else value < self.best)
        self.best, self.num_worse = (value, 0) if is_better else (self.best, self.num_worse + 1)
        if self.num_worse >= self.patience:
            run.stop(f"{self.metric} is no better than {self.best:.4g} since {self.patience} evaluations")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_worse": self.num_worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.num_worse = state["best"], state["num_worse"]


@register_callback("early_stopping_accuracy")
def early_stopping_accuracy() -> EarlyStopping:
    return EarlyStopping("accuracy", is_highest=True)
