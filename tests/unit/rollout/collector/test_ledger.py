from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlite.errors import RliteError
from rlite.rollout import RolloutLedger, capacity
from rlite.rollout.collector.ledger import MAX_REASONS

ORACLE = json.loads((Path(__file__).parents[3] / "oracles" / "08_staleness_capacity.json").read_text())
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
        capacity(running=row["running"], accepted=row["accepted"], version=row["version"], **bounds(row))
        for row in rows
    ]
    assert found == case["expected"]["capacity"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["kind"] == "trace"])
def test_the_counts_follow_the_oracle_traces(name: str) -> None:
    case = CASES[name]
    ledger, version, started, found = RolloutLedger(), 0, 0, []
    running: list[int] = []
    for event in case["inputs"]["events"]:
        if event == "new_version":
            version += 1
        elif event.startswith("recover:"):
            version = int(event.removeprefix("recover:"))
            ledger = RolloutLedger(batch_size=case["params"]["consumer_batch_size"] or 1, version=version)
            running = []
        elif event == "submit":
            ledger.submit(started)
            running.append(ledger.start(version))
            started += 1
        elif event == "accept":
            ledger.accept(running.pop(0))
        else:
            ledger.drop(running.pop(0), event)
        counters = ledger.counters
        found.append(
            capacity(running=counters.running, accepted=counters.accepted, version=version, **bounds(case["params"]))
        )
    assert found == case["expected"]["capacity_after_each_event"]


def test_an_empty_ledger_has_no_group_to_start() -> None:
    with pytest.raises(RliteError, match="no group waits"):
        RolloutLedger().start(0)


@pytest.mark.parametrize("step", [lambda r: r.accept(0), lambda r: r.drop(0, "why"), lambda r: r.consume([0], 0)])
def test_impossible_transition_fails_an_assertion(step: Any) -> None:
    with pytest.raises(AssertionError, match="group 0 is in another queue"):
        step(RolloutLedger())


def test_a_long_run_keeps_some_reasons_and_counts_them_all() -> None:
    ledger = RolloutLedger()
    for group in range(300):
        ledger.submit(group)
        ledger.drop(group, f"row {group}")
    assert len(ledger.lost) <= MAX_REASONS + 1
    assert ledger.lost["row 0"] == 1
    assert ledger.lost.total() == ledger.counters.rejected == 300


def test_a_batch_waits_for_the_group_that_it_would_leave_too_old() -> None:
    """Two of three groups of version 0 (eta 2, batches of 1) must go into the batches at versions 1 and 2. At version
    1 the newer group is ready, but has to wait for one of them."""
    ledger = RolloutLedger(batch_size=1, max_head_offpolicyness=2, max_concurrent=10)
    for group in range(4):
        ledger.submit(group)
    assert ledger.room(0) == 3
    assert [ledger.start(0) for _ in range(3)] == [0, 1, 2]
    ledger.accept(0)
    assert ledger.is_ready(1, 0)
    ledger.consume(ledger.oldest(1), 0)
    ledger.start(1)
    ledger.accept(3)
    assert not ledger.is_ready(1, 1)
    assert ledger.holding(1, 1) == [1, 2]
    ledger.accept(2)
    assert ledger.is_ready(1, 1)
    assert ledger.oldest(1) == [2]
    ledger.consume([2], 1)
    assert ledger.holding(1, 2) == [1]
    assert ledger.too_old(2) == []
    assert ledger.too_old(3) == [1]


def test_a_batch_of_the_oldest_waits_for_no_other_of_their_age() -> None:
    ledger = RolloutLedger(batch_size=1, max_head_offpolicyness=1, max_concurrent=10)
    for group in range(2):
        ledger.submit(group)
        ledger.start(0)
    ledger.accept(1)
    assert ledger.is_ready(1, 1), "one of the two will be too old at version 2, whichever is consumed now"


def test_versions_that_move_without_batches_let_no_more_run_ahead() -> None:
    ledger = RolloutLedger(batch_size=2, max_head_offpolicyness=1, max_concurrent=100)
    assert [ledger.room(version) for version in (0, 1, 7)] == [4, 4, 4]


def test_on_stale_drop_does_not_wait_for_slow_groups() -> None:
    ledger = RolloutLedger(batch_size=1, max_head_offpolicyness=0, max_concurrent=10, on_stale="drop")
    for group in range(2):
        ledger.submit(group)
    ledger.start(0)
    assert ledger.too_old(1) == [0]
    ledger.drop(0, "too old")
    assert ledger.start(1) == 1
    ledger.accept(1)
    assert ledger.is_ready(1, 1)


class Schedule:
    """A trainer and an engine whose every next step is drawn: groups start, end in any order, fail, are refused, are
    consumed, the version moves. Nothing is known of it but what the ledger says."""

    def __init__(self, draw: random.Random, batch: int, eta: int, concurrent: int, on_stale: Any) -> None:
        self.draw, self.batch, self.eta = draw, batch, eta
        self.ledger = RolloutLedger(
            batch_size=batch, max_head_offpolicyness=eta, max_concurrent=concurrent, on_stale=on_stale
        )
        self.version = self.submitted = 0
        self.born: dict[int, int] = {}
        self.running: list[int] = []
        self.consumed: list[int] = []
        self.is_trained = False

    def step(self, allows_idle_updates: bool) -> None:
        possible = {
            "submit": self.ledger.counters.waiting < 3,
            "start": self.ledger.counters.waiting > 0 and self.ledger.room(self.version) > 0,
            "end": bool(self.running),
            "lose": bool(self.running),
            "consume": not self.is_trained and self.ledger.is_ready(self.batch, self.version),
            "update": self.is_trained or allows_idle_updates,
        }
        weights = {"submit": 4, "start": 4, "end": 3, "lose": 1, "consume": 3, "update": 2}
        events = [name for name, is_possible in possible.items() if is_possible]
        can_go_on = self.is_trained or set(events) - {"submit", "update"}
        assert can_go_on or not self.ledger.counters.waiting, "the pipeline never stands still"
        getattr(self, self.draw.choices(events, [weights[name] for name in events])[0])()

    def submit(self) -> None:
        self.ledger.submit(self.submitted)
        self.submitted += 1

    def start(self) -> None:
        group = self.ledger.start(self.version)
        self.born[group] = self.version
        self.running.append(group)

    def end(self) -> None:
        self.ledger.accept(self.running.pop(self.draw.randrange(len(self.running))))

    def lose(self) -> None:
        self.ledger.drop(self.running.pop(self.draw.randrange(len(self.running))), "failed")

    def consume(self) -> None:
        groups = self.ledger.oldest(self.batch)
        assert len(groups) == self.batch
        assert all(self.version - self.born[group] <= self.eta for group in groups), "no older than the bound"
        self.ledger.consume(groups, self.version)
        self.consumed += groups
        self.is_trained = True

    def update(self) -> None:
        self.version += 1
        self.is_trained = False
        for group in self.ledger.too_old(self.version):
            self.ledger.drop(group, "too old")
            if group in self.running:
                self.running.remove(group)


@settings(max_examples=1000, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 5),
    eta=st.integers(0, 3),
    concurrent=st.integers(1, 16),
    on_stale=st.sampled_from(["wait", "drop"]),
    allows_idle_updates=st.booleans(),
)
def test_in_any_order_of_events_nothing_is_too_old_lost_or_used_twice_and_all_goes_on(
    seed: int, batch: int, eta: int, concurrent: int, on_stale: str, allows_idle_updates: bool
) -> None:
    schedule = Schedule(random.Random(seed), batch, eta, concurrent, on_stale)
    for _ in range(120):
        schedule.step(allows_idle_updates)
        counters = schedule.ledger.counters
        assert counters.running == len(schedule.running) <= concurrent
        assert counters.submitted == schedule.submitted, "every group is somewhere"
    counters = schedule.ledger.counters
    assert len(set(schedule.consumed)) == len(schedule.consumed) == counters.consumed, "nothing is consumed twice"
    assert counters.rejected == sum(schedule.ledger.lost.values()), "what is lost has a reason"
    if on_stale == "wait" and not allows_idle_updates:
        assert not schedule.ledger.lost["too old"], "who consumes a batch before each update loses none"
