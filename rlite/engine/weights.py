"""Weight sync: any sharding to any sharding, strict, in place, versioned.

    layouts     the box of each tensor that each worker holds, at both ends (names and shapes only)
    plan        for each box of the target, the source boxes that cover it, each element exactly once; else an error
    move        the target reads each piece in place (shared memory, CUDA IPC), or receives it in buckets
    version     raised by one, only after all weights have arrived

A target that could not be written whole refuses to serve until a sync succeeds. `runtime/replicas/weight_moves.py`
moves the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from rlite.engine.weight_plan import make_plan
from rlite.errors import ConfigError, WeightSyncError, WorkerError
from rlite.observability import trace
from rlite.runtime.cluster.group import apply_on_processes
from rlite.runtime.parallel.shared_memory import can_share_memory
from rlite.runtime.replicas.engine import Engine
from rlite.runtime.replicas.transport import Layout, Piece, Transport, check_transport, describe
from rlite.runtime.replicas.weight_moves import Plan, Route, broadcast, prove, read_gathered, read_shared, verify

OnInflight = Literal["continue", "abort"]


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """Result of one sync."""

    version: int
    num_bytes: int
    """bytes written, over all workers of the target"""
    seconds: float
    transport: str
    num_tensors: int

    def __str__(self) -> str:
        mebibytes, seconds = self.num_bytes / 2**20, max(self.seconds, 1e-9)
        rate = f"{mebibytes / 1024 / seconds:.2f} GiB/s, {self.transport}"
        return f"version {self.version}: {mebibytes:.1f} MiB in {self.seconds:.3f} s ({rate})"


def sync_weights(
    source: Engine, target: Engine, on_inflight: OnInflight, verify_checksums: bool, transport: Transport = "auto"
) -> SyncReport:
    """Write the source's weights into the target; see `RliteTrainEngine.p2p_weight_sync`."""
    if on_inflight not in ("continue", "abort"):
        raise ConfigError(f"on_inflight={on_inflight!r}: expected 'continue' or 'abort'")
    if target is source:
        raise ConfigError(f"{source.name} cannot be synced with itself")
    check_transport(transport, source.name, source.group.devices, target.name, target.group.devices)
    started = time.perf_counter()
    with trace.span("weight sync", source=source.name, target=target.name), target.receiving_weights(on_inflight):
        while True:
            members = target.members
            try:
                with source.sending:
                    sync = Sync(source, target, may_share=transport in ("auto", "shared"))
                    way = sync.best_transport() if transport == "auto" else transport
                    size = sync.move(way)
                    if verify_checksums:
                        verify(sync.route, sync.plan)
                break
            except WorkerError:  # a replica that is lost is replaced, and the others still need the weights
                if not target.has_lost_some_of(members):
                    raise
    if verify_checksums:
        prove(sync.route, sync.plan, target)
    took, names = time.perf_counter() - started, set().union(*(each.places for each in sync.route.targets.values()))
    return SyncReport(version=target.get_version(), num_bytes=size, seconds=took, transport=way, num_tensors=len(names))


class Sync:
    """The layouts and the plan of one sync."""

    def __init__(self, source: Engine, target: Engine, may_share: bool) -> None:
        self.source, self.target = source, target
        self._members = target.members  # one that is lost from now on is missed by the calls on its ranks
        self._ranks = [rank for copy in self._members for rank in copy.ranks]
        """ranks of the target"""
        layouts = self._describe(may_share)
        sources, targets = layouts[: len(source.group)], layouts[len(source.group) :]
        hosts = {layout.host for layout in targets}
        near = [copy for copy in source.copies if {sources[rank].host for rank in copy.ranks} == hosts]
        copy = (near or source.copies)[0]  # on the target's machine if there is one, else the first
        offered, of_rank = [sources[rank] for rank in copy.ranks], dict(zip(self._ranks, targets, strict=True))
        self.route = Route(source.group, copy, offered, target.group, of_rank)
        self.plan = self._plan(offered)

    def _describe(self, may_share: bool) -> list[Layout]:
        """Return the layouts of all workers of both engines, from one round of calls. A source on CPU adds handles.

        If one process holds all workers, its tensors need no handles that another process can open.
        """
        source, target = groups = [self.source.group, self.target.group]
        workers = [*((source, rank) for rank in range(len(source))), *((target, rank) for rank in self._ranks)]
        processes = {group.handles[rank].process for group, rank in workers}
        is_shared = may_share and len(processes) > 1 and can_share_memory() and source.devices[0].kind == "cpu"
        is_near = {target.devices[rank] for rank in self._ranks} <= set(source.devices)
        flags = {source: (True, is_shared, is_near), target: (False, False, is_near)}
        calls = [(group, rank, (group.key(rank),), flags[group]) for group, rank in workers]
        return apply_on_processes(calls, describe, groups, "describe weights", source.call_timeout)

    def _plan(self, offered: Sequence[Layout]) -> Plan:
        plan: Plan = {}
        for copy in self._members:
            layouts = [self.route.targets[rank] for rank in copy.ranks]
            plan |= zip(copy.ranks, known_plan(self.target, offered, layouts), strict=True)
        return plan

    def best_transport(self) -> Transport:
        """Return the transport for the processes and devices of both engines."""
        source, target, layouts = self.route.source, self.route.target, self.route.layouts
        if len({layout.process for layout in layouts}) == 1:
            return "shared"
        if source.devices[0].kind == "cpu":
            is_one_host = len({layout.host for layout in layouts}) == 1
            return "shared" if is_one_host and can_share_memory() else "broadcast"
        devices = [target.devices[rank] for rank in self._ranks]
        if set(devices) <= set(source.devices):  # whichever copy: NCCL refuses two processes on a GPU
            return "gathered"
        if self.route.is_staged_on_host:
            return "broadcast"
        senders = {source.devices[rank]: source.handles[rank].process for rank in self.route.copy.ranks}
        for device, handle in zip(devices, [target.handles[rank] for rank in self._ranks], strict=True):
            if senders.get(device, handle.process) != handle.process:
                raise WeightSyncError(
                    f"{target.name} shares {device} with {source.name}, but has other GPUs besides, and NCCL refuses "
                    "two processes on one GPU. Build them on the same devices (colocate_with), or on none in common "
                    "(not_colocate_with)"
                )
        return "broadcast"

    def move(self, transport: Transport) -> int:
        """Write every piece of the plan.

        Returns the number of bytes written.
        """
        if transport == "gathered":
            return read_gathered(self.route, self._plan)
        return (read_shared if transport == "shared" else broadcast)(self.route, self.plan)


_plans: WeakKeyDictionary[Engine, list[tuple[Any, list[list[Piece]]]]] = WeakKeyDictionary()
"""the layouts and the pieces of each target's latest plans, which serve its equal replicas and the next sync"""
MOST_PLANS = 4


def known_plan(target: Engine, sources: Sequence[Layout], targets: Sequence[Layout]) -> list[list[Piece]]:
    """Return `make_plan` of these layouts, from memory if it is known. For many workers it takes seconds."""
    plans, layouts = _plans.setdefault(target, []), (list(targets), list(sources))
    for known, pieces in plans:
        if known == layouts:
            return pieces
    plans.append((layouts, make_plan(sources, targets, target.name)))
    del plans[:-MOST_PLANS]
    return plans[-1][1]
