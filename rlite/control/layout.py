"""Layout of a job: which workload is on which device. A pure function; nodes and devices are numbers.

    roles, collocation groups, nodes --lay_out--> Layout  |  PlacementError

A role outside of any group has its devices for itself, one for each workload. The roles of a group share all devices of
their nodes in turns: with 4 actors and 4 rollouts on 4 devices, each device has an actor and a rollout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlite.control.roles import RLRoleType
from rlite.errors import PlacementError

MAX_SHARING = 5
"""workloads on one device"""


@dataclass(frozen=True)
class RoleSize:
    """Number of a role's workloads."""

    total: int
    per_node: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the role needs."""
        return -(-self.total // self.per_node)


@dataclass(frozen=True)
class Seat:
    """Device of a workload."""

    node: int
    device: int


@dataclass(frozen=True)
class Layout:
    """Seats of all workloads."""

    seats: Mapping[RLRoleType, tuple[Seat, ...]]
    """by role and rank"""
    num_devices: tuple[int, ...]
    """devices in use on each node"""

    def local_ranks(self, role: RLRoleType) -> tuple[tuple[int, int], ...]:
        """Return each rank's local rank and local world size."""
        sizes = Counter(seat.node for seat in self.seats[role])
        seen: Counter[int] = Counter()
        ranks = []
        for seat in self.seats[role]:
            ranks.append((seen[seat.node], sizes[seat.node]))
            seen[seat.node] += 1
        return tuple(ranks)


def lay_out(
    sizes: Mapping[RLRoleType, RoleSize], groups: Sequence[Sequence[RLRoleType]], node_num: int, device_per_node: int
) -> Layout:
    """Place all workloads.

    Args:
        sizes: roles with the number of their workloads.
        groups: roles that share devices.
        node_num: nodes of the job.
        device_per_node: devices of each node.

    Returns:
        The layout.

    Raises:
        PlacementError: the workloads do not fit; the message has the numbers.
    """
    shared = {role for group in groups for role in group}
    widths = {tuple(group): _shared_width(group, sizes, device_per_node) for group in groups}
    widths |= {(role,): _own_width(role, size, device_per_node) for role, size in sizes.items() if role not in shared}
    used = [0] * node_num
    seats: dict[RLRoleType, tuple[Seat, ...]] = {}
    for group, width in sorted(widths.items(), key=lambda item: -item[1]):  # large ones first, to fit more
        num_nodes = max(sizes[role].num_nodes for role in group)
        free = [node for node in range(node_num) if device_per_node - used[node] >= width]
        if len(free) < num_nodes:
            raise PlacementError(
                f"{','.join(group)}: {num_nodes} nodes with {width} free devices are needed, and {len(free)} of "
                f"{node_num} nodes have them: {device_per_node} devices on each node, and other roles hold "
                f"{sum(used)} of {node_num * device_per_node}. Share devices (with_collocation), ask for fewer "
                "workloads, or for more nodes or devices"
            )
        chosen, offset = free[:num_nodes], 0
        for role in group:
            seats[role] = _seats(sizes[role], chosen, used, width, offset)
            offset += sizes[role].per_node
        for node in chosen:
            used[node] += width
    return Layout({role: seats[role] for role in sizes}, tuple(used))


def _seats(size: RoleSize, nodes: Sequence[int], used: Sequence[int], width: int, offset: int) -> tuple[Seat, ...]:
    places = (divmod(rank, size.per_node) for rank in range(size.total))
    return tuple(Seat(nodes[node], used[nodes[node]] + (offset + place) % width) for node, place in places)


def _shared_width(group: Sequence[RLRoleType], sizes: Mapping[RLRoleType, RoleSize], device_per_node: int) -> int:
    per_node = {role: sizes[role].per_node for role in group}
    total = sum(per_node.values())
    if total % device_per_node or not 1 <= total // device_per_node <= MAX_SHARING:
        terms = " + ".join(f"{number} ({role})" for role, number in per_node.items())
        raise PlacementError(
            f"collocation {','.join(group)} does not fit: {terms} = {total} workloads per node; expected a multiple of "
            f"device_per_node={device_per_node}, at most {MAX_SHARING} times it"
        )
    return device_per_node


def _own_width(role: RLRoleType, size: RoleSize, device_per_node: int) -> int:
    width = min(size.per_node, size.total)
    if width > device_per_node:
        raise PlacementError(
            f"{role}: per_node={size.per_node} workloads need a device each, and device_per_node={device_per_node}; "
            "ask for fewer per node, or for more devices"
        )
    return width


def check_capacity(layout: Layout, capacities: Sequence[int], kind: str) -> None:
    """Check that a cluster's nodes can hold a layout.

    Args:
        layout: the layout.
        capacities: devices of each node of the cluster.
        kind: Ray's name of the devices.

    Raises:
        PlacementError: the nodes cannot hold the layout.
    """
    free = sorted(capacities, reverse=True)
    for width in sorted(filter(None, layout.num_devices), reverse=True):
        fitting = [node for node, left in enumerate(free) if left >= width]
        if not fitting:
            asked = " + ".join(map(str, filter(None, layout.num_devices[:8])))
            more = " + ..." if len(layout.num_devices) > 8 else ""
            has = ", ".join(map(str, list(capacities)[:8])) or "none"
            raise PlacementError(
                f"the job needs {asked}{more} devices (Ray resource {kind}) on its nodes, and the cluster's nodes have "
                f"{has}. Ask for fewer, or start Ray with more"
            )
        free[min(fitting, key=free.__getitem__)] -= width
