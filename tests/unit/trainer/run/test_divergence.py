"""When a run counts as diverged."""

from __future__ import annotations

import math

import pytest

from rlite.trainer.run.training_run import DivergenceWatch

GOOD = {"loss": 1.0, "grad_norm": 2.0}
BAD = {"loss": 1.0, "grad_norm": math.nan}


def seen(steps: str, max_skipped: int = 3) -> DivergenceWatch:
    """Watch a run: "g" is a good step, "b" one whose update was skipped."""
    watch = DivergenceWatch(max_skipped)
    for step in steps:
        watch.see(GOOD if step == "g" else BAD)
    return watch


@pytest.mark.parametrize(
    ("steps", "has_diverged"),
    [
        ("gbb", False),
        ("gbbb", True),
        ("bbgbb", False),
        ("bgbgbgbgbg", False),
        ("bgbgbgbgbgb", True),
        ("b" + 20 * "g", False),
    ],
)
def test_a_run_diverges_by_skips_in_a_row_or_by_their_share(steps: str, has_diverged: bool) -> None:
    assert seen(steps).has_diverged == has_diverged


@pytest.mark.parametrize(
    "metrics", [{"loss": math.inf}, {"grad_norm": math.nan}, {"critic/loss": math.nan, "loss": 1.0}]
)
def test_an_update_of_any_model_that_is_not_finite_counts(metrics: dict[str, float]) -> None:
    assert not DivergenceWatch(3).see(metrics)


def test_a_step_without_an_update_and_a_mean_over_nothing_beside_it_count_for_nothing() -> None:
    watch = DivergenceWatch(1)
    assert watch.see({"accuracy": 0.5, "test_loss": math.nan})
    assert not watch.has_diverged


def test_a_loss_that_explodes_and_stays_finite_counts_where_losses_compare() -> None:
    watch = DivergenceWatch(3, has_absolute_loss=True)
    assert watch.see({"loss": 5.6, "grad_norm": 1.0})
    assert not watch.see({"loss": 1e7, "grad_norm": 1e9})
    assert "more than 10 times" in watch.cause
    assert not watch.see({"loss": 5.55, "grad_norm": 0.0})
    assert not watch.see({"loss": 5.55, "grad_norm": 0.0})
    assert watch.has_diverged
    assert DivergenceWatch(3).see({"loss": 1e7, "grad_norm": 0.0}), "a policy's loss says nothing by its size"


def test_perfectly_separated_pairs_are_not_divergence() -> None:
    watch = DivergenceWatch(3, has_absolute_loss=True)
    assert [watch.see({"loss": loss, "grad_norm": loss}) for loss in (0.69, 0.1, 0.0, 0.0)] == [True] * 4
