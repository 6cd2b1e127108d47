"""The policy of the autoscaler is a function of the load."""

from __future__ import annotations

import pytest

from rlite.errors import ConfigError
from rlite.restarts import RestartBudget
from rlite.runtime.replicas.replica_set import EngineLoad, SlowToShrink, TargetInFlight


def test_the_target_is_met_within_the_bounds() -> None:
    policy = TargetInFlight(per_replica=10, min_replicas=2, max_replicas=4)
    wanted = [policy(EngineLoad(num_replicas=1, num_in_flight=num)) for num in (0, 20, 21, 40, 1000)]
    assert wanted == [2, 2, 3, 4, 4]


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_replicas"):
        TargetInFlight(per_replica=10, min_replicas=3, max_replicas=2)


def test_a_pause_in_the_load_keeps_the_replicas() -> None:
    times = iter([0, 30, 60, 61, 90, 100, 120, 121, 160, 220])
    policy = SlowToShrink(TargetInFlight(per_replica=1, max_replicas=9), after_s=60.0, clock=lambda: next(times))
    num, seen = 4, []
    for in_flight in [0, 0, 0, 5, 0, 3, 0, 0, 0, 0]:
        num = policy(EngineLoad(num_replicas=num, num_in_flight=in_flight))
        seen.append(num)
    assert seen == [4, 4, 1, 5, 5, 5, 5, 3, 1, 1]


def test_a_budget_forgets_restarts_outside_its_window() -> None:
    budget = RestartBudget(max_restarts=2, window_s=100.0)
    assert budget.allows([], now=0.0)
    assert budget.allows([0.0], now=1.0)
    assert not budget.allows([0.0, 1.0], now=99.0)
    assert budget.allows([0.0, 1.0], now=100.0)
    assert not RestartBudget(max_restarts=0).allows([], now=0.0)
