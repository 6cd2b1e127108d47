from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlite.errors import RliteError
from rlite.rollout import RolloutCounters, capacity

ORACLE = json.loads((Path(__file__).parents[2] / "oracles" / "08_staleness_capacity.json").read_text())
CASES = {case["id"]: case for case in ORACLE["cases"]}


def bounds(params: dict[str, int]) -> dict[str, int]:
    return {
        "max_concurrent": params["max_concurrent"],
        "consumer_batch_size": params["consumer_batch_size"],
        "max_head_offpolicyness": params["max_staleness"],
    }


def test_capacity_agrees_with_the_oracle_table() -> None:
    case = CASES["stale-public-table"]
    rows = [dict(zip(case["params"]["columns"], row, strict=True)) for row in case["inputs"]["rows"]]
    found = [
        capacity(
            RolloutCounters(
                submitted=row["running"] + row["accepted"], running=row["running"], accepted=row["accepted"]
            ),
            version=row["version"],
            **bounds(row),
        )
        for row in rows
    ]
    assert found == case["expected"]["capacity"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["kind"] == "trace"])
def test_the_counters_follow_the_oracle_traces(name: str) -> None:
    case = CASES[name]
    counters, version, found = RolloutCounters(), 0, []
    transitions: dict[str, Callable[[RolloutCounters], RolloutCounters]] = {
        "submit": lambda c: c.submit().start(),
        "accept": lambda c: c.accept(),
        "reject": lambda c: c.reject(),
    }
    for event in case["inputs"]["events"]:
        if event == "new_version":
            version += 1
        elif event.startswith("recover:"):
            version = int(event.removeprefix("recover:"))
            counters = RolloutCounters.at_version(version, case["params"]["consumer_batch_size"])
        else:
            counters = transitions[event](counters)
        found.append(capacity(counters, version=version, **bounds(case["params"])))
    assert found == case["expected"]["capacity_after_each_event"]


@pytest.mark.parametrize(
    "step",
    [lambda c: c.start(), lambda c: c.accept(), lambda c: c.reject(), lambda c: c.withdraw(), lambda c: c.consume(1)],
)
def test_a_transition_that_cannot_be_is_refused(step: Callable[[RolloutCounters], RolloutCounters]) -> None:
    with pytest.raises(RliteError, match="impossible rollout counters"):
        step(RolloutCounters())


@given(
    batch=st.integers(1, 6),
    eta=st.integers(0, 3),
    max_concurrent=st.integers(1, 12),
    choices=st.lists(st.integers(0, 5), max_size=200),
)
def test_what_is_admitted_by_capacity_is_never_too_old_where_updates_wait_for_older_groups(
    batch: int, eta: int, max_concurrent: int, choices: list[int]
) -> None:
    """Groups start when there is capacity and end in any order; an update consumes the oldest batch, and waits for
    groups that run. Capacity alone bounds no straggler that the updates overtake."""
    counters, version = RolloutCounters(), 0
    running: list[tuple[int, int]] = []  # (number, version at its start)
    ready: list[tuple[int, int]] = []
    started = 0

    def room() -> int:
        limits: dict[str, Any] = {"max_concurrent": max_concurrent, "consumer_batch_size": batch}
        return capacity(counters, version=version, max_head_offpolicyness=eta, **limits)

    for choice in choices:
        if choice <= 1 and room() > 0:
            counters = counters.submit().start()
            running.append((started, version))
            started += 1
        elif choice == 2 and running:
            running.pop(0)
            counters = counters.reject()
        elif choice <= 4 and running:
            ready.append(running.pop(choice % len(running)))
            counters = counters.accept()
        elif choice == 5 and len(ready) >= batch and not running:
            ready.sort()
            consumed, ready = ready[:batch], ready[batch:]
            counters = counters.consume(batch)
            assert all(version - born <= eta for _, born in consumed)
            version += 1
        assert counters.running == len(running)
        assert counters.ready == len(ready)
        assert counters.submitted == started
    assert room() > 0 or running or len(ready) >= batch, "there is always something that can go on"
