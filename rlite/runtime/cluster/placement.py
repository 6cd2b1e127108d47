"""Choice of devices for an engine: a pure function of the ledger and the request.

    Ledger --place(request)--> (Ledger with the owner in it, devices of each executor)  |  PlacementError
    Ledger --release(owner)--> Ledger without it

A ledger is immutable, so a placement happens completely or not at all, and the current ledger is the truth. The rules:

- An owner takes free devices, unless it names owners to be colocated with. Then it takes their devices, in their order,
  so that rank i of both is on the same device if their sizes agree.
- No device is shared with an owner in `not_colocate_with`, in either direction, or with an exclusive owner.
- The devices of an executor are on one node if any node is large enough, else on whole nodes and a part of one more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

from rlite.errors import PlacementError, did_you_mean, refuse
from rlite.wording import counted

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, order=True)
class Device:
    """One GPU, or one CPU slot if there is no GPU."""

    node: str
    """the launcher's name of the machine; several nodes may share an ip"""
    index: int
    """position on the node, from 0"""
    ip: str = "127.0.0.1"
    kind: DeviceKind = "cpu"

    @property
    def torch_name(self) -> str:
        """Name of the device in a process that sees the whole node."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"

    def __str__(self) -> str:
        return f"{self.ip}/{self.kind}:{self.index}"


Executors = tuple[tuple[Device, ...], ...]
"""[executor][rank in the executor]"""


@dataclass(frozen=True, kw_only=True)
class PlacementRequest:
    """Request of one engine, or of one role of a job."""

    owner: str
    """name of the engine; unique in a ledger"""
    executor_size: int
    """devices of one executor"""
    num_executors: int | None = None
    """None: as many as fit, at least one"""
    colocate_with: tuple[str, ...] = ()
    """take devices of these owners, instead of free ones"""
    not_colocate_with: tuple[str, ...] = ()
    """share no device with these owners"""
    acceptable_node_ips: tuple[str, ...] | None = None
    """only devices on these nodes; None: on all"""
    exclusive: bool = False
    """no later owner may share these devices"""

    def __post_init__(self) -> None:
        smallest = self.executor_size if self.num_executors is None else min(self.executor_size, self.num_executors)
        both = [name for name in self.colocate_with if name in self.not_colocate_with]
        is_shared = self.exclusive and self.colocate_with
        has_no_node = self.acceptable_node_ips is not None and not self.acceptable_node_ips
        problems = {
            "expected at least one executor of at least one device": smallest < 1,
            f"{_quoted(both[:1])} is in colocate_with and in not_colocate_with; remove it from one": both,
            "an exclusive owner shares no device; remove exclusive or colocate_with": is_shared,
            "acceptable_node_ips is empty, so no node is allowed; leave it out to allow all nodes": has_no_node,
        }
        refuse({f"{self}: {problem}": applies for problem, applies in problems.items()}, PlacementError)

    def __str__(self) -> str:
        executors = "at least 1 executor" if self.num_executors is None else counted(self.num_executors, "executor")
        conditions = {
            f"{executors} of {counted(self.executor_size, 'device')}": True,
            "exclusively": self.exclusive,
            f"colocated with {_quoted(self.colocate_with)}": self.colocate_with,
            f"not colocated with {_quoted(self.not_colocate_with)}": self.not_colocate_with,
            f"on nodes {', '.join(self.acceptable_node_ips or ())}": self.acceptable_node_ips,
        }
        return f"{self.owner!r} asks for {_applying(conditions)}"


@dataclass(frozen=True)
class Placement:
    """A granted request."""

    request: PlacementRequest
    executors: Executors

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices of the placement."""
        return tuple(device for executor in self.executors for device in executor)


@dataclass(frozen=True)
class Ledger:
    """All devices and their owners."""

    devices: tuple[Device, ...]
    """in the order in which they are given out; the devices of one node stand together, by index"""
    placements: Mapping[str, Placement] = field(default_factory=dict)
    """by owner, in the order of placement"""

    def __post_init__(self) -> None:
        if len(set(self.devices)) != len(self.devices):
            raise PlacementError("a ledger holds every device once; found one twice")
        first_seen = {node: position for position, node in enumerate(dict.fromkeys(d.node for d in self.devices))}
        in_order = tuple(sorted(self.devices, key=lambda device: (first_seen[device.node], device.index)))
        object.__setattr__(self, "devices", in_order)

    def free(self) -> tuple[Device, ...]:
        """Return the devices without an owner."""
        held = {device for placement in self.placements.values() for device in placement.devices}
        return tuple(device for device in self.devices if device not in held)

    def release(self, owner: str) -> Ledger:
        """Return a ledger in which the owner holds nothing."""
        self._check_known("release", (owner,))
        return replace(self, placements={name: p for name, p in self.placements.items() if name != owner})

    def place(self, request: PlacementRequest) -> tuple[Ledger, Executors]:
        """Grant a request. The same ledger and request give the same devices on every machine.

        Returns the ledger with the new owner, and for each executor its devices in the order of its ranks.
        """
        self._check(request)
        granted = Placement(request, self._choose(request, self._candidates(request)))
        return replace(self, placements={**self.placements, request.owner: granted}), granted.executors

    def grow(self, owner: str, num_executors: int) -> tuple[Ledger, Executors]:
        """Grant an owner more executors, on the conditions of its request.

        Returns the ledger with them, and the devices of each further executor.
        """
        others, placement = self.release(owner), self.placements[owner]
        request = replace(placement.request, num_executors=num_executors)
        candidates = [device for device in others._candidates(request) if device not in placement.devices]
        further = self._choose(request, candidates)
        return self._with_executors(owner, (*placement.executors, *further)), further

    def shrink(self, owner: str, executors: Collection[tuple[Device, ...]]) -> Ledger:
        """Return a ledger in which the owner does not hold these executors."""
        self._check_known("shrink", (owner,))
        left = tuple(executor for executor in self.placements[owner].executors if executor not in executors)
        return self._with_executors(owner, left)

    def moved(self, places: Mapping[Device, Device]) -> Ledger:
        """Return the ledger after devices were replaced by others, such as those of a dead node."""

        def at(devices: Iterable[Device]) -> tuple[Device, ...]:
            return tuple(places.get(device, device) for device in devices)

        placements = {
            owner: replace(each, executors=tuple(map(at, each.executors))) for owner, each in self.placements.items()
        }
        return Ledger(at(self.devices), placements)

    def _with_executors(self, owner: str, executors: Executors) -> Ledger:
        changed = replace(self.placements[owner], executors=executors)
        return replace(self, placements={**self.placements, owner: changed})

    def _choose(self, request: PlacementRequest, candidates: list[Device]) -> Executors:
        """Return the devices of each executor, out of the candidates."""
        node_sizes = Counter(device.node for device in self.devices)
        if request.colocate_with:
            executors = _in_order(candidates, request.executor_size, node_sizes)[: request.num_executors]
        else:
            executors = _best_fit(candidates, request.executor_size, node_sizes, request.num_executors)
        if len(executors) < (request.num_executors or 1):
            raise PlacementError(self._refusal(request, candidates, len(executors)))
        return tuple(executors)

    def _check_known(self, who: str, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.placements:
                hint = did_you_mean(name, self.placements) if self.placements else "no owner holds any yet"
                raise PlacementError(f"{who}: {name!r} holds no devices; {hint}")

    def _check(self, request: PlacementRequest) -> None:
        owner = request.owner
        if owner in self.placements:
            held = _listing(self.placements[owner].devices)
            raise PlacementError(f"{owner!r} holds {held} already; release() it before it is placed again")
        self._check_known(f"colocate_with of {owner!r}", request.colocate_with)
        self._check_known(f"not_colocate_with of {owner!r}", request.not_colocate_with)
        known = dict.fromkeys(device.ip for device in self.devices)
        if unknown := [ip for ip in request.acceptable_node_ips or () if ip not in known]:
            told = f"acceptable_node_ips of {owner!r} names {', '.join(unknown)}, and no node has that address"
            raise PlacementError(f"{told}; nodes are at {_shortened(list(known))}")

    def _barred(self, request: PlacementRequest) -> dict[str, str]:
        """Return the owners of suitable devices that the request cannot have, with the reason."""
        suitable = set(self._suitable(request))
        barred = {}
        for name, placement in self.placements.items():
            if suitable.isdisjoint(placement.devices):
                continue
            if name in request.not_colocate_with:
                barred[name] = "in not_colocate_with"
            elif request.owner in placement.request.not_colocate_with:
                barred[name] = f"was placed with not_colocate_with {request.owner!r}"
            elif placement.request.exclusive:
                barred[name] = "exclusive"
            elif not request.colocate_with:
                barred[name] = ""
        return barred

    def _suitable(self, request: PlacementRequest) -> list[Device]:
        """Return the devices that would fit if no owner held them, in order of preference."""
        pool: Iterable[Device] = self.devices
        if request.colocate_with:
            pool = dict.fromkeys(d for name in request.colocate_with for d in self.placements[name].devices)
        ips = request.acceptable_node_ips
        return [device for device in pool if ips is None or device.ip in ips]

    def _candidates(self, request: PlacementRequest) -> list[Device]:
        """Return the devices that the request can have, in order of preference."""
        barred = {device for name in self._barred(request) for device in self.placements[name].devices}
        return [device for device in self._suitable(request) if device not in barred]

    def _refusal(self, request: PlacementRequest, candidates: list[Device], num_fit: int) -> str:
        barred = self._barred(request)
        held = [
            f"{name!r} holds {_listing(self.placements[name].devices)}" + (f" ({reason})" if reason else "")
            for name, reason in barred.items()
        ]
        is_enough = len(candidates) >= request.executor_size * (request.num_executors or 1)
        apart = ", which lie apart: an executor needs one node, or whole ones if none is large enough"
        shareable = [repr(name) for name, reason in barred.items() if not reason]
        fewer = f"at most {counted(num_fit, 'executor')}" if num_fit else "smaller executors"
        fitting = f", {_listing(candidates)}" if candidates else ""
        remedies = {
            f"share devices with colocate_with={_shortened(shareable)}": shareable,
            f"release() {_shortened(list(map(repr, barred)))}": barred,
            "colocate with owners that hold more devices": request.colocate_with,
            "accept more nodes in acceptable_node_ips": request.acceptable_node_ips,
            f"ask for fewer devices ({fewer})": candidates,
            "start with more devices (num_devices=...)": True,
        }
        return (
            f"{request}; {num_fit or 'none'} can be placed. "
            f"It can have {len(candidates)} of {len(self.devices)} devices"
            f"{fitting}{apart if is_enough else ''}. "
            f"Free: {_listing(self.free()) or 'none'}. In the way: {_shortened(held, '; ') or 'nothing'}. "
            f"Remedy: {_applying(remedies, ', or ')}"
        )


def _best_fit(
    candidates: list[Device], size: int, node_sizes: Mapping[str, int], num_executors: int | None
) -> list[tuple[Device, ...]]:
    """Choose free devices on the tightest nodes, so that large gaps stay whole for other requests.

    `num_executors`: None takes as many as fit. Returns the devices of each executor.
    """
    position = {device: i for i, device in enumerate(candidates)}
    by_node = _by_node(candidates)
    if size > max(node_sizes.values(), default=0):
        executors = _spanning(by_node, size, node_sizes, num_executors)
    else:
        room = {node: len(devices) // size for node, devices in by_node.items()}
        wanted = sum(room.values()) if num_executors is None else num_executors
        tightest = sorted(by_node, key=lambda node: len(by_node[node]))
        whole_engine = [node for node in tightest if room[node] >= wanted]  # its executors talk to each other, too
        executors = []
        for node in whole_engine[:1] or tightest:
            executors += _carve(by_node[node], size, min(room[node], wanted - len(executors)))
    in_order = (tuple(sorted(executor, key=position.__getitem__)) for executor in executors)
    return sorted(in_order, key=lambda executor: position[executor[0]])


def _spanning(
    by_node: dict[str, list[Device]], size: int, node_sizes: Mapping[str, int], num_executors: int | None
) -> list[tuple[Device, ...]]:
    """Choose devices for executors larger than any node: whole nodes, largest first, then a part of one more.

    `num_executors`: None takes as many as fit. Returns the devices of each executor.
    """
    free = dict(by_node)
    executors: list[tuple[Device, ...]] = []
    while num_executors is None or len(executors) < num_executors:
        taken: list[Device] = []
        whole = [node for node, devices in free.items() if len(devices) == node_sizes[node]]
        for node in sorted(whole, key=node_sizes.__getitem__, reverse=True):
            if node_sizes[node] <= size - len(taken):
                taken += free.pop(node)
        if missing := size - len(taken):
            large_enough = [node for node, devices in free.items() if len(devices) >= missing]
            if not large_enough:
                break
            node = min(large_enough, key=lambda node: (len(free[node]) == node_sizes[node], len(free[node])))
            (part,) = _carve(free[node], missing, 1)
            taken += part
            free[node] = [device for device in free[node] if device not in part]
        executors.append(tuple(taken))
    return executors


def _in_order(candidates: list[Device], size: int, node_sizes: Mapping[str, int]) -> list[tuple[Device, ...]]:
    """Return executors made of the targets' devices, in the targets' order."""
    if size > max(node_sizes.values(), default=0):
        return _chunks(candidates, size)
    position = {device: i for i, device in enumerate(candidates)}
    executors = [executor for devices in _by_node(candidates).values() for executor in _chunks(devices, size)]
    return sorted(executors, key=lambda executor: position[executor[0]])


def _carve(devices: Sequence[Device], size: int, count: int) -> list[tuple[Device, ...]]:
    """Return `count` executors from one node with room for them: adjacent devices, from the shortest runs with room."""
    executors: list[tuple[Device, ...]] = []
    scattered: list[Device] = []
    for run in sorted(_runs(devices), key=len):
        chunks = _chunks(run, size)[: count - len(executors)]
        executors += chunks
        scattered += run[len(chunks) * size :]
    scattered.sort(key=lambda device: device.index)
    return executors + _chunks(scattered, size)[: count - len(executors)]


def _runs(devices: Sequence[Device]) -> list[list[Device]]:
    """Return the devices of one node, by ascending index, cut where an index is missing."""
    numbered = groupby(enumerate(devices), key=lambda item: item[1].index - item[0])
    return [[device for _, device in run] for _, run in numbered]


def _chunks(devices: Sequence[Device], size: int) -> list[tuple[Device, ...]]:
    """Return consecutive chunks of that size; a remainder is left out."""
    return [tuple(devices[i : i + size]) for i in range(0, len(devices) - size + 1, size)]


def _by_node(devices: Iterable[Device]) -> dict[str, list[Device]]:
    nodes: dict[str, list[Device]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device)
    return nodes


# Messages


def _listing(devices: Iterable[Device]) -> str:
    """Return a text such as "10.0.0.1/cuda:0-3,6, 10.0.0.2/cuda:0", shortened after a few nodes."""
    nodes = []
    for on_node in _by_node(devices).values():
        ends = [(run[0].index, run[-1].index) for run in _runs(sorted(on_node))]
        ranges = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
        nodes.append(f"{on_node[0].ip}/{on_node[0].kind}:{ranges}")
    return _shortened(nodes)


def _applying(parts: Mapping[str, object], separator: str = ", ") -> str:
    return separator.join(part for part, applies in parts.items() if applies)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _shortened(items: list[str], separator: str = ", ") -> str:
    most = 8
    more = [f"and {len(items) - most} more"] if len(items) > most else []
    return separator.join(items[:most] + more)
