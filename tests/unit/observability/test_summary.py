from __future__ import annotations

import json
import math
from pathlib import Path

from rlite.services.console.terminal import History


def test_it_compares_evaluations_and_the_first_and_last_tenth_of_the_steps() -> None:
    history = History(["accuracy"], ["reward"])
    history.add(0, {"accuracy": 0.25})
    for step in range(1, 21):
        more = {"accuracy": {10: 0.75, 20: 0.5}[step]} if step % 10 == 0 else {}
        history.add(step, {"reward": float(step), **more})
    assert history.rows() == {
        "accuracy": "0.2500 at step 0 -> 0.5000 at step 20, best 0.7500 at step 10",
        "reward": "1.5000 -> 19.50, means of the first and of the last 2 steps",
    }


def test_the_best_loss_is_the_lowest_and_what_is_not_finite_does_not_count() -> None:
    history = History(["test_loss"], ["loss"], ["test_loss"])
    for step, value in enumerate([3.0, float("nan"), 1.0, 2.0]):
        history.add(step, {"test_loss": value})
    assert history.rows() == {"test_loss": "3.0000 at step 0 -> 2.0000 at step 3, best 1.0000 at step 2"}


def test_the_best_value_of_the_metric_that_chooses_the_best_model_is_told_by_another_line_alone() -> None:
    """It knows which evaluations count: of ties the first, and neither the untrained model nor invalid ones."""
    history = History(["accuracy", "other"], [], [], "accuracy")
    for step, value in enumerate([0.75, 0.5, 0.5, 0.25]):
        history.add(step, {"accuracy": value, "other": value + 1})
    assert history.rows() == {
        "accuracy": "0.7500 at step 0 -> 0.2500 at step 3",
        "other": "1.7500 at step 0 -> 1.2500 at step 3, best 1.7500 at step 0",
    }


def test_metrics_of_an_earlier_attempt_count_and_equal_texts_appear_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "a": step, "b": step, "x": "nan"}) + "\n" for step in (1, 2)))
    with path.open("a") as file:
        file.write('{"step": [5], "a": 1}\n{"step": 5, "a": [1]}\n{"step": 5, "a": ' + "9" * 400 + '}\n{"step"')
    history = History(["a", "b", "x"], [])
    history.read(path)
    history.read(tmp_path / "missing")
    assert history.rows() == {"a": "1.0000 at step 1 -> 2.0000 at step 2"}
    history.add(3, {"a": 3})
    assert history.rows()["a"] == "1.0000 at step 1 -> 3.0000 at step 3"


def test_an_evaluation_beside_training_is_of_the_step_of_its_weights() -> None:
    history = History(["a/accuracy", "accuracy"], [])
    for step, value in ((5, 0.25), (14, 1.0)):
        history.add(step, {"a/accuracy": value, "a/lag_steps": 2.0, "accuracy": value, "lag_steps": 1.0})
    assert history.rows() == {
        "a/accuracy": "0.2500 at step 3 -> 1.0000 at step 12",
        "accuracy": "0.2500 at step 4 -> 1.0000 at step 13",
    }
    history.add(15, {"accuracy": 0.5, "lag_steps": math.nan})  # a damaged line
    assert history.rows()["accuracy"].endswith("at step 13")


def test_a_best_value_that_the_last_evaluation_has_too_is_not_repeated() -> None:
    history = History(["accuracy"], [])
    for step, value in ((1, 0.25), (2, 0.5), (3, 0.5)):
        history.add(step, {"accuracy": value})
    assert history.rows() == {"accuracy": "0.2500 at step 1 -> 0.5000 at step 3"}
