"""Which metrics of a step that is made again are compared with those that were logged."""

from __future__ import annotations

from rlite.assembly.proof.comparison import compare_metrics
from rlite.trainer.rl.rollouts import SAID_ONCE


def test_means_of_all_rollouts_are_not_compared_with_those_of_the_rollouts_that_were_trained_on() -> None:
    logged = dict.fromkeys([*SAID_ONCE.values(), "turn_limited", "reward", "uniform_groups", "loss"], 0.5)
    again = dict.fromkeys(logged, 0.25)
    names = [each.name for each in compare_metrics(logged, again, True, is_complete=False, is_exact=False)]
    assert names == ["loss"]
    assert len(compare_metrics(logged, again, True, is_complete=True, is_exact=False)) == len(logged)
