"""When a run counts as diverged."""

from __future__ import annotations

import math

import pytest

from rlite.trainer.divergence import DivergenceWatch

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
