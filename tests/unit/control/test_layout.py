"""Layouts: who shares a device with whom, and how long ten thousand workloads take."""

from __future__ import annotations

from collections import Counter

import pytest

from rlite.control.spec import RLRoleType, RoleSpec, Seat, check_capacity, lay_out
from rlite.errors import PlacementError

ACTOR, ROLLOUT, CRITIC = RLRoleType.ACTOR, RLRoleType.ROLLOUT, RLRoleType.CRITIC


def size(total: int, per_node: int) -> RoleSpec:
    return RoleSpec(workload="my:Workload", total=total, per_node=per_node)


def test_roles_of_a_group_share_devices_in_turns() -> None:
    layout = lay_out({ACTOR: size(4, 4), ROLLOUT: size(4, 4)}, [(ACTOR, ROLLOUT)], 1, 4)
    assert layout.seats[ACTOR] == layout.seats[ROLLOUT] == tuple(Seat(0, device) for device in range(4))
    uneven = lay_out({ACTOR: size(3, 3), ROLLOUT: size(5, 5)}, [(ACTOR, ROLLOUT)], 1, 4)
    devices = Counter(seat.device for seats in uneven.seats.values() for seat in seats)
    assert set(devices.values()) == {2}


def test_roles_outside_of_a_group_have_devices_for_themselves() -> None:
    layout = lay_out({ACTOR: size(4, 2), ROLLOUT: size(2, 1), CRITIC: size(2, 1)}, [], 2, 4)
    seats = [seat for each in layout.seats.values() for seat in each]
    assert len(set(seats)) == len(seats) == 8
    assert layout.num_devices == (4, 4)
    assert layout.local_ranks(ACTOR) == ((0, 2), (1, 2), (0, 2), (1, 2))


def test_a_cluster_with_too_few_devices_is_refused() -> None:
    layout = lay_out({ACTOR: size(6, 3)}, [], 2, 4)
    check_capacity(layout, [8], "CPU")
    check_capacity(layout, [3, 3], "CPU")
    for capacities in ([5], [3, 2], []):
        with pytest.raises(PlacementError, match=r"needs 3 \+ 3 devices \(Ray resource CPU\)"):
            check_capacity(layout, capacities, "CPU")


def test_ten_thousand_workloads_are_placed() -> None:
    sizes = {ACTOR: size(4000, 4), ROLLOUT: size(4000, 4), CRITIC: size(2000, 8)}
    layout = lay_out(sizes, [(ACTOR, ROLLOUT)], 1250, 8)
    check_capacity(layout, [8] * 1250, "GPU")
    assert sum(map(len, layout.seats.values())) == 10_000
    assert layout.local_ranks(CRITIC)[-1] == (7, 8)
