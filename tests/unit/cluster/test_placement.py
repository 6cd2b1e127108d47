from __future__ import annotations

import pickle
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlite.errors import PlacementError
from rlite.runtime.cluster.placement import Device, Executors, Ledger, Placement, PlacementRequest


def cluster(*sizes: int) -> Ledger:
    """Nodes a, b, ... at 10.0.0.1, 10.0.0.2, ... with so many devices each."""
    return Ledger(
        tuple(
            Device("abcdefgh"[node], index, f"10.0.0.{node + 1}", "cuda")
            for node, size in enumerate(sizes)
            for index in range(size)
        )
    )


def place(ledger: Ledger, owner: str, size: int, number: int | None = None, **options: Any) -> Ledger:
    return ledger.place(PlacementRequest(owner=owner, executor_size=size, num_executors=number, **options))[0]


def shown(ledger: Ledger, owner: str) -> list[str]:
    """The executors of an owner, such as ["a0 a1", "b0 b1"]."""
    executors = ledger.placements[owner].executors
    return [" ".join(f"{device.node}{device.index}" for device in executor) for executor in executors]


def occupied(ledger: Ledger, *names: str) -> Ledger:
    """A ledger in which another owner holds these devices, such as "a0"."""
    taken = tuple((device,) for device in ledger.devices if f"{device.node}{device.index}" in names)
    other = Placement(PlacementRequest(owner="other", executor_size=1), taken)
    return Ledger(ledger.devices, {"other": other})


# Free devices


@pytest.mark.parametrize(
    ("ledger", "size", "number", "expected"),
    [
        (cluster(4), 1, 2, ["a0", "a1"]),
        (cluster(4), 2, None, ["a0 a1", "a2 a3"]),
        (cluster(5), 2, None, ["a0 a1", "a2 a3"]),
        (cluster(4, 4), 4, 2, ["a0 a1 a2 a3", "b0 b1 b2 b3"]),
        (cluster(8, 2), 2, 1, ["b0 b1"]),  # the tightest node, so that a keeps its eight together
        (cluster(3, 8), 2, 2, ["b0 b1", "b2 b3"]),  # one node for the whole engine
        (cluster(2, 3), 1, 4, ["a0", "a1", "b0", "b1"]),  # ranks in the order of nodes
        (cluster(3, 3), 2, None, ["a0 a1", "b0 b1"]),  # an executor is not torn apart while a node is large enough
        (occupied(cluster(6), "a1"), 2, 1, ["a2 a3"]),  # adjacent
        (occupied(cluster(7), "a4"), 2, 1, ["a5 a6"]),  # from the shortest run
        (occupied(cluster(5), "a1", "a3"), 2, 1, ["a0 a2"]),  # not adjacent, if that is all there is
        (occupied(cluster(4, 4), "a0", "a1", "b0"), 2, 1, ["a2 a3"]),  # best fit
        (cluster(4, 4), 8, 1, ["a0 a1 a2 a3 b0 b1 b2 b3"]),
        (cluster(4, 4, 4, 4), 8, None, ["a0 a1 a2 a3 b0 b1 b2 b3", "c0 c1 c2 c3 d0 d1 d2 d3"]),
        (occupied(cluster(4, 4, 4), "a0"), 8, 1, ["b0 b1 b2 b3 c0 c1 c2 c3"]),  # whole nodes
        (occupied(cluster(4, 4, 4), "c0"), 6, 1, ["a0 a1 a2 a3 c1 c2"]),  # and a part of a broken one
        (cluster(4, 4, 4), 6, None, ["a0 a1 a2 a3 b0 b1", "b2 b3 c0 c1 c2 c3"]),
        (cluster(2, 4, 2), 6, 1, ["a0 a1 b0 b1 b2 b3"]),
        (cluster(1, 1, 1), 2, None, ["a0 b0"]),
    ],
)
def test_free_devices_are_given_out_by_the_rules(
    ledger: Ledger, size: int, number: int | None, expected: list[str]
) -> None:
    assert shown(place(ledger, "engine", size, number), "engine") == expected


def test_only_acceptable_nodes_are_used() -> None:
    ledger = place(cluster(2, 2, 2), "x", 1, acceptable_node_ips=("10.0.0.3", "10.0.0.1"))
    assert shown(ledger, "x") == ["a0", "a1", "c0", "c1"]


def test_the_default_number_of_executors_respects_all_relations() -> None:
    ledger = place(cluster(4), "a", 1, 2)
    ledger = place(ledger, "b", 1, colocate_with=("a",))
    assert shown(place(ledger, "c", 1, not_colocate_with=("a", "b")), "c") == ["a2", "a3"]


def test_nodes_keep_the_order_in_which_they_were_given() -> None:
    ledger = Ledger((Device("z", 1), Device("z", 0), Device("b", 0)))
    assert shown(place(ledger, "x", 1), "x") == ["z0", "z1", "b0"]


# Shared devices


@pytest.mark.parametrize(
    ("size", "number", "expected"),
    [
        (2, 2, ["a0 a1", "b0 b1"]),
        (2, None, ["a0 a1", "b0 b1"]),
        (1, None, ["a0", "a1", "b0", "b1"]),
        (1, 3, ["a0", "a1", "b0"]),
    ],
)
def test_colocated_owners_follow_the_order_of_their_target(size: int, number: int | None, expected: list[str]) -> None:
    ledger = place(cluster(3, 3), "target", 2, 2)
    assert shown(place(ledger, "x", size, number, colocate_with=("target",)), "x") == expected


def test_owners_of_equal_sizes_have_equal_executors_even_across_nodes() -> None:
    for sizes, size in (((4, 4), 8), ((4, 4, 4), 6), ((3, 5), 2), ((4, 4), 1)):
        ledger = place(cluster(*sizes), "target", size)
        ledger = place(ledger, "x", size, colocate_with=("target",))
        assert shown(ledger, "x") == shown(ledger, "target")


def test_the_union_of_several_targets_can_be_used() -> None:
    ledger = place(place(cluster(4), "a", 1, 2), "b", 1, 2)
    assert shown(place(ledger, "x", 4, colocate_with=("b", "a")), "x") == ["a2 a3 a0 a1"]


def test_all_relations_hold_together() -> None:
    ledger = place(cluster(2, 2), "a", 1)
    ledger = place(ledger, "b", 1, 1, colocate_with=("a",))
    assert shown(place(ledger, "x", 1, colocate_with=("a",), not_colocate_with=("b",)), "x") == ["a1", "b0", "b1"]
    ips = ("10.0.0.2",)
    assert shown(place(ledger, "x", 1, colocate_with=("a",), acceptable_node_ips=ips), "x") == ["b0", "b1"]


def test_not_colocate_with_holds_when_the_other_owner_returns() -> None:
    ledger = place(cluster(4), "a", 1, 2)
    ledger = place(ledger, "b", 1, 2, not_colocate_with=("a",))
    with pytest.raises(PlacementError, match="was placed with not_colocate_with 'a'"):
        place(ledger.release("a"), "a", 1, 1, colocate_with=("b",))


# Refusals


def test_a_refusal_says_what_was_asked_what_is_free_what_is_in_the_way_and_the_remedy() -> None:
    ledger = place(place(cluster(4), "policy", 2, 1), "judge", 1, 1, exclusive=True)
    with pytest.raises(PlacementError) as refused:
        place(ledger, "rollout", 2, 1)
    assert str(refused.value) == (
        "'rollout' asks for 1 executor of 2 devices; none can be placed. "
        "It can have 1 of 4 devices, 10.0.0.1/cuda:3. Free: 10.0.0.1/cuda:3. "
        "In the way: 'policy' holds 10.0.0.1/cuda:0-1; 'judge' holds 10.0.0.1/cuda:2 (exclusive). "
        "Remedy: share devices with colocate_with='policy', or release() 'policy', 'judge', "
        "or ask for fewer devices (smaller executors), or start with more devices (num_devices=...)"
    )


HELD = place(place(cluster(2, 2), "one", 2, 1), "alone", 1, 1, exclusive=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor_size": 0}, "expected at least one executor of at least one device"),
        ({"num_executors": 0}, "expected at least one executor of at least one device"),
        ({"owner": "one"}, r"'one' holds 10.0.0.1/cuda:0-1 already; release\(\) it"),
        ({"colocate_with": ("ome",)}, "colocate_with of 'x': 'ome' holds no devices; did you mean 'one'"),
        ({"not_colocate_with": ("two",)}, "not_colocate_with of 'x': 'two' holds no devices"),
        ({"colocate_with": ("one",), "not_colocate_with": ("one",)}, "'one' is in colocate_with and in not_colocate"),
        ({"colocate_with": ("one",), "exclusive": True}, "an exclusive owner shares no device"),
        ({"colocate_with": ("alone",)}, r"'alone' holds 10.0.0.2/cuda:0 \(exclusive\)"),
        ({"colocate_with": ("one",), "num_executors": 3}, "at most 2 executors"),
        ({"acceptable_node_ips": ("192.0.2.1",)}, r"192.0.2.1, and no node has that .* 10.0.0.1, 10.0.0.2"),
        ({"acceptable_node_ips": ()}, "acceptable_node_ips is empty, so no node is allowed"),
        ({"acceptable_node_ips": ("10.0.0.1",)}, r"on nodes 10.0.0.1; none .* accept more nodes"),
        (
            {"num_executors": 2},
            r"asks for 2 executors of 1 device; 1 can be placed.*fewer devices \(at most 1 executor\)",
        ),
        ({"executor_size": 5}, "start with more devices"),
    ],
)
def test_impossible_requests_are_refused_with_the_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        HELD.place(PlacementRequest(**{"owner": "x", "executor_size": 1, **options}))


def test_devices_that_lie_apart_are_said_to() -> None:
    with pytest.raises(PlacementError, match=r"4 of 6 devices, .* which lie apart"):
        place(occupied(cluster(3, 3), "a0", "b0"), "x", 3, 1)


def test_owners_elsewhere_are_not_said_to_be_in_the_way() -> None:
    with pytest.raises(PlacementError, match=r"In the way: nothing\. Remedy: colocate with owners that hold more"):
        place(HELD, "x", 1, 3, colocate_with=("one",))


def test_an_unknown_owner_cannot_be_released() -> None:
    with pytest.raises(PlacementError, match="release: 'onee' holds no devices; did you mean 'one'"):
        HELD.release("onee")
    with pytest.raises(PlacementError, match="no owner holds any yet"):
        cluster(1).release("x")


def test_a_ledger_without_devices_refuses_everything() -> None:
    with pytest.raises(PlacementError, match="It can have 0 of 0 devices"):
        place(Ledger(()), "x", 1)


# Properties

OWNERS = ("p", "q", "r", "s", "t")
names = st.lists(st.sampled_from(OWNERS), max_size=2, unique=True).map(tuple)
requests = st.fixed_dictionaries(
    {
        "owner": st.sampled_from(OWNERS),
        "executor_size": st.integers(1, 7),
        "num_executors": st.none() | st.integers(1, 4),
        "colocate_with": st.just(()) | names,
        "not_colocate_with": st.just(()) | names,
        "acceptable_node_ips": st.none() | st.sampled_from([("10.0.0.1",), ("10.0.0.2", "10.0.0.1")]),
        "exclusive": st.booleans(),
    }
)


def check(ledger: Ledger, request: PlacementRequest, executors: Executors) -> None:
    """Check the properties of every placement, for any algorithm."""
    taken = [device for executor in executors for device in executor]
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(ledger.devices)
    assert len(executors) == (request.num_executors or len(executors)) >= 1
    assert all(len(executor) == request.executor_size for executor in executors)
    for device in taken:
        owners = [name for name, placement in ledger.placements.items() if device in placement.devices]
        assert not set(owners) & set(request.not_colocate_with)
        assert not any(ledger.placements[owner].request.exclusive for owner in owners)
        assert set(owners) & set(request.colocate_with) if request.colocate_with else not owners
        assert request.acceptable_node_ips is None or device.ip in request.acceptable_node_ips
    largest = max(sum(device.node == node for device in ledger.devices) for node in "abc")
    if request.executor_size <= largest:
        assert all(len({device.node for device in executor}) == 1 for executor in executors)


@given(st.lists(st.integers(1, 5), min_size=2, max_size=3), st.lists(requests, max_size=8))
def test_every_placement_keeps_the_rules_and_release_restores(sizes: list[int], wanted: list[dict[str, Any]]) -> None:
    ledger = cluster(*sizes)
    for options in wanted:
        before = pickle.loads(pickle.dumps(ledger))
        try:
            request = PlacementRequest(**options)
            after, executors = ledger.place(request)
        except PlacementError:
            if options["owner"] in ledger.placements:
                ledger = ledger.release(options["owner"])
            continue
        assert ledger == before  # no partial state, whatever came of it
        check(ledger, request, executors)
        assert ledger.place(request) == (after, executors)
        assert after.placements[request.owner].devices == tuple(device for executor in executors for device in executor)
        restored = after.release(request.owner)
        assert restored == ledger
        assert restored.free() == ledger.free()
        ledger = pickle.loads(pickle.dumps(after))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_default_number_of_executors_fills_the_free_devices_of_each_node(sizes: list[int], data: st.DataObject) -> None:
    ledger = cluster(*sizes)
    busy = data.draw(st.lists(st.sampled_from([f"{d.node}{d.index}" for d in ledger.devices]), unique=True))
    size = data.draw(st.integers(1, max(sizes)))
    ledger = occupied(ledger, *busy)
    room = sum(sum(device.node == node for device in ledger.free()) // size for node in "abc")
    if room:
        assert len(shown(place(ledger, "x", size), "x")) == room
    else:
        with pytest.raises(PlacementError):
            place(ledger, "x", size)


@pytest.mark.parametrize(("size", "number"), [(1, 10_000), (8, 1_250), (12, 833), (10_000, 1)])
def test_ten_thousand_devices_are_placed_in_under_two_seconds(size: int, number: int) -> None:
    nodes = [f"node-{node}" for node in range(1_250)]
    ledger = Ledger(tuple(Device(node, index, kind="cuda") for node in nodes for index in range(8)))
    started = time.process_time()
    ledger, executors = ledger.place(PlacementRequest(owner="x", executor_size=size, num_executors=number))
    ledger, shared = ledger.place(PlacementRequest(owner="y", executor_size=size, colocate_with=("x",)))
    with pytest.raises(PlacementError) as refused:
        ledger.place(PlacementRequest(owner="z", executor_size=8))
    assert time.process_time() - started < 2
    assert shared == executors
    assert len(executors) == number
    assert len(str(refused.value)) < 2_000


def test_a_device_is_in_a_ledger_once() -> None:
    with pytest.raises(PlacementError, match="twice"):
        Ledger((Device("a", 0), Device("a", 0)))


# Owners that grow and shrink


def test_an_owner_grows_on_the_conditions_of_its_request_and_shrinks_again() -> None:
    before = place(place(cluster(4), "served", 1, 1), "trained", 1, 1)
    after, further = before.grow("served", 2)
    assert shown(after, "served") == ["a0", "a2", "a3"]
    assert [device.index for (device,) in further] == [2, 3]
    with pytest.raises(PlacementError, match="none can be placed"):
        after.grow("served", 1)
    assert after.shrink("served", further) == before
    shared = place(place(cluster(4), "trained", 1, 4), "served", 2, 1, colocate_with=("trained",))
    shared, _ = shared.grow("served", 1)
    assert shown(shared, "served") == ["a0 a1", "a2 a3"]
    with pytest.raises(PlacementError, match="none can be placed"):
        shared.grow("served", 1)


def test_an_owner_that_grows_keeps_apart_from_whom_it_was_placed_apart() -> None:
    ledger = place(cluster(2, 2), "first", 1, 1)
    ledger = place(ledger, "second", 1, 1, not_colocate_with=("first",), acceptable_node_ips=("10.0.0.2",))
    ledger, _ = ledger.grow("second", 1)
    assert shown(ledger, "second") == ["b0", "b1"]
    with pytest.raises(PlacementError):
        ledger.grow("second", 1)
    with pytest.raises(PlacementError, match="third"):
        ledger.grow("third", 1)


def test_devices_of_a_dead_node_are_others_for_all_their_owners() -> None:
    ledger = place(cluster(2, 1, 1), "a", 1, 2)
    ledger = place(ledger, "b", 1, 2, colocate_with=("a",))
    old = ledger.placements["a"].devices[0]
    new = replace(ledger.devices[-1], index=7)
    moved = ledger.moved({old: new})
    assert moved.placements["a"].devices == moved.placements["b"].devices == (new, ledger.placements["a"].devices[1])
    assert new in moved.devices
    assert old not in moved.devices
    assert len(moved.free()) == len(ledger.free())
