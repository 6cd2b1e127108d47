"""The best model of a run, and the thresholds at which it stops."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from rlite.errors import ConfigError
from rlite.trainer.options import RunOptions
from rlite.trainer.run.best import BestModel, Thresholds, check_evaluated


def options(**given: object) -> RunOptions:
    return RunOptions(save_dir="x", **given)


def see(best: BestModel, step: int, metrics: Mapping[str, float]) -> None:
    """Evaluate a model whose only file has the step."""

    def save(folder: Path) -> None:
        folder.mkdir()
        (folder / "model").write_text(str(step))

    best.see(step, metrics, save)


def saved(folder: Path, metric: str, *values: float) -> list[int]:
    """The evaluations after which the model was saved."""
    best, steps = BestModel(options(best_metric=metric), folder), []
    folder.mkdir()
    for step, value in enumerate(values):
        see(best, step, {metric: value})
        steps.append(int((folder / "best/model").read_text()))
    return list(dict.fromkeys(steps))


def test_the_best_accuracy_is_the_highest_and_the_best_loss_the_lowest(tmp_path: Path) -> None:
    assert saved(tmp_path / "a", "math/accuracy", 0.5, 0.4, float("nan"), 0.6, 0.6) == [0, 3]
    assert saved(tmp_path / "b", "chat/test_loss", 2.0, 3.0, 1.0) == [0, 2]


def test_the_best_evaluation_is_described_with_its_step(tmp_path: Path) -> None:
    best = BestModel(options(best_metric="math/accuracy"), tmp_path)
    assert best.value is None
    for step, value in ((4, 0.25), (8, 0.5), (12, 0.5)):
        see(best, step, {"math/accuracy": value})
    assert (best.value, best.step) == (0.5, 8)


def test_a_run_that_was_killed_goes_on_with_the_value_of_the_model_that_is_there(tmp_path: Path) -> None:
    see(BestModel(options(best_metric="accuracy"), tmp_path), 8, {"accuracy": 0.5})
    best = BestModel(options(best_metric="accuracy"), tmp_path)
    assert best.restore() == ""
    assert (best.value, best.step) == (0.5, 8)
    see(best, 12, {"accuracy": 0.4})
    assert (tmp_path / "best/model").read_text() == "8"


@pytest.mark.parametrize(
    ("given", "now"),
    [
        ({"best_metric": "test_loss"}, "the lowest test_loss"),
        ({"best_metric": "accuracy", "best_is_highest": False}, "the lowest accuracy"),
    ],
)
def test_a_value_of_another_metric_or_direction_is_not_compared(
    given: dict[str, object], now: str, tmp_path: Path
) -> None:
    see(BestModel(options(best_metric="accuracy"), tmp_path), 8, {"accuracy": 0.5})
    best = BestModel(options(**given), tmp_path)
    chosen = "best/ has been chosen by the highest accuracy"
    assert best.restore() == f"{chosen}, and trainer.best_metric is {now} now"
    see(best, 12, {"accuracy": 0.9, "test_loss": 2.0})
    assert (tmp_path / "best/model").read_text() == "12"


def test_a_model_that_does_not_say_why_it_is_the_best_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    for content in ("", "[]", '{"step": "x"}', "[" * 100_000, f'{{"step": 1, "value": 1{"0" * 400}}}'):
        (tmp_path / "best/evaluation.json").write_text(content)
        best = BestModel(options(best_metric="accuracy"), tmp_path)
        assert best.restore().startswith("best/ has been chosen by an unknown metric")
        assert best.value is None


@pytest.mark.parametrize("value", ["", ', "value": NaN', ', "value": 1e999', ', "value": "0.5"', ', "value": true'])
def test_a_model_without_a_finite_value_is_replaced(value: str, tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    facts = f'{{"step": 4, "metric": "accuracy", "is_lowest": false{value}}}'
    (tmp_path / "best/evaluation.json").write_text(facts)
    best = BestModel(options(best_metric="accuracy"), tmp_path)
    assert best.restore() == "best/evaluation.json has no finite value of accuracy"
    see(best, 8, {"accuracy": 0.1})
    assert (best.value, (tmp_path / "best/model").read_text()) == (0.1, "8")


def test_a_save_that_fails_leaves_the_value_to_beat(tmp_path: Path) -> None:
    best = BestModel(options(best_metric="accuracy"), tmp_path)
    with pytest.raises(OSError, match="full"):
        best.see(4, {"accuracy": 0.5}, _fail)
    see(best, 4, {"accuracy": 0.5})
    assert (tmp_path / "best/model").read_text() == "4"


def _fail(folder: Path) -> None:
    raise OSError("full")


def test_evaluations_of_other_sets_are_no_missing_metric(caplog: pytest.LogCaptureFixture) -> None:
    best = BestModel(options(best_metric="math/accuracy"), Path("run"))
    best.see(1, {"code/accuracy": 1.0}, lambda path: pytest.fail("saved"))
    assert not caplog.records
    best.see(2, {"math/num_errors": 9.0}, lambda path: pytest.fail("saved"))
    [record] = caplog.records
    assert "trainer.best_metric=math/accuracy: the evaluation at step 2 has no such metric" in record.getMessage()


def test_a_run_stops_when_the_newest_values_reach_all_thresholds() -> None:
    goals = Thresholds({"math/accuracy": 0.9, "test_loss": 0.5})
    assert goals.see({"math/accuracy": 0.95}) == ""
    assert goals.see({"test_loss": 0.6}) == ""
    assert goals.see({"math/accuracy": 0.8, "test_loss": 0.4}) == "", "the accuracy has fallen again"
    assert goals.see({"other": 1.0}) == ""
    assert goals.see({"math/accuracy": 10 / 11}) == "math/accuracy=0.9091 reaches trainer.stop_at=0.9"


def test_a_threshold_whose_metric_an_evaluation_lacks_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    goals = Thresholds({"math/majority@4": 0.9})
    for _ in range(2):
        assert goals.see({"code/accuracy": 1.0}) == ""
    assert not caplog.records
    for _ in range(2):
        assert goals.see({"math/accuracy": 1.0}) == ""
    [record] = caplog.records
    expected = "trainer.stop_at=math/majority@4: an evaluation has no such metric (math/accuracy); it stops nothing"
    assert record.getMessage() == expected


def test_values_of_float32_scores_reach_the_threshold_that_they_are_equal_to() -> None:
    accuracy = float(torch.tensor([0.7, 0.9]).double().mean())
    assert accuracy < 0.8
    assert Thresholds({"accuracy": 0.8}).see({"accuracy": accuracy})
    assert not Thresholds({"accuracy": 0.8}).see({"accuracy": 0.79999})
    assert Thresholds({"test_loss": 0.7}).see({"test_loss": 0.7 + 1e-8})
    assert not Thresholds({"test_loss": 0.7}).see({"test_loss": 0.70001})


def test_nothing_stops_a_run_without_thresholds() -> None:
    assert Thresholds({}).see({"accuracy": 1.0}) == ""


@pytest.mark.parametrize(
    ("given", "evaluated", "message"),
    [
        ({"best_metric": "mth/accuracy"}, ["math/accuracy"], "best_metric=mth/accuracy: expected a metric of the eval"),
        ({"stop_at": {"accuracy": 0.9}}, ["math/accuracy"], "stop_at=accuracy: expected a metric .*, math/accuracy"),
        ({"stop_at": {"accuracy": 0.9}}, [], "stop_at=accuracy: nothing is evaluated without test_data.path"),
        ({"best_metric": "m/pass@9"}, [f"m/pass@{k}" for k in range(1, 20)] + ["m/x"], "did you mean|expected"),
    ],
)
def test_metrics_that_no_evaluation_has_are_refused(
    given: dict[str, object], evaluated: list[str], message: str
) -> None:
    known = [name for name in evaluated if name != "m/pass@9"]
    with pytest.raises(ConfigError, match=message):
        check_evaluated(options(**given), known)
