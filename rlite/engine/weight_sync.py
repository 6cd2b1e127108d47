"""Weight sync: any sharding to any sharding, strict, in place, versioned.

    layouts     the box of each tensor that each worker holds, at both ends (names and shapes only)
    plan        for each box of the target, the source boxes that cover it, each element exactly once; else an error
    move        the target reads each piece in place (shared memory, CUDA IPC), or receives it in buckets
    version     raised by one, only after all weights have arrived

A target that could not be written whole refuses to serve until a sync succeeds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from rlite.engine.base import Engine
from rlite.engine.transport import (
    Broadcast,
    Bucket,
    Layout,
    Meeting,
    Piece,
    Place,
    checksums,
    describe,
    leave_meeting,
    read,
    share,
    take_part,
    unshare,
)
from rlite.engine.workers import Executor, on_each_process
from rlite.errors import ConfigError, RliteError, WeightSyncError, WorkerError
from rlite.observability import trace
from rlite.runtime.cluster.group import WorkerGroup, apply_on_processes
from rlite.runtime.cluster.session import current_session
from rlite.runtime.parallel.processes import open_store
from rlite.runtime.parallel.shards import Box, nonfinite_names
from rlite.runtime.parallel.shared_memory import aligned_bytes, can_share_memory

OnInflight = Literal["continue", "abort"]
Transport = Literal["auto", "shared", "gathered", "broadcast"]
BUCKET_BYTES = 256 * 2**20
PART_S = 10.0
"""time limit in seconds for a process to leave a process group"""


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
        rate = self.num_bytes / max(self.seconds, 1e-9) / 2**30
        megabytes = self.num_bytes / 2**20
        return (
            f"version {self.version}: {megabytes:.1f} MiB in {self.seconds:.3f} s ({rate:.2f} GiB/s, {self.transport})"
        )


def sync_weights(
    source: Engine, target: Engine, on_inflight: OnInflight, verify_checksums: bool, transport: Transport = "auto"
) -> SyncReport:
    """Write the source's weights into the target; see `RliteTrainEngine.p2p_weight_sync`.

    Args:
        source: a train engine.
        target: an engine with memory for weights on its device.
        on_inflight: "continue" or "abort" generation in flight.
        verify_checksums: compare every tensor at both ends afterwards, and look for non-finite weights.
        transport: "auto" chooses by the processes and devices of both engines.

    Returns:
        The report of the sync.

    Raises:
        ConfigError: `on_inflight` is unknown, or source and target are the same engine.
        ResidencyError: the target has no memory for weights.
        WeightSyncError: a tensor does not match, or arrived weights are not finite.
        WorkerError: a worker was lost that is not replaced.
    """
    if on_inflight not in ("continue", "abort"):
        raise ConfigError(f"on_inflight={on_inflight!r}: expected 'continue' or 'abort'")
    if target is source:
        raise ConfigError(f"{source.name} cannot be synced with itself")
    started = time.perf_counter()
    with trace.span("weight sync", source=source.name, target=target.name), target.receiving_weights(on_inflight):
        while True:
            members = target.members
            try:
                with source.sending:
                    sync, chosen, written = _move(source, target, verify_checksums, transport)
                break
            except WorkerError:
                if not target.has_lost_some_of(members):
                    raise
    return SyncReport(
        version=target.get_version(),
        num_bytes=written,
        seconds=time.perf_counter() - started,
        transport=chosen,
        num_tensors=len(set().union(*(layout.places for layout in sync.targets.values()))),
    )


def _move(source: Engine, target: Engine, verify_checksums: bool, transport: Transport) -> tuple[Sync, Transport, int]:
    """Write the source's weights into all members of the target.

    Returns:
        The sync, its transport, and the number of bytes written.
    """
    sync = Sync(source, target, may_share=transport in ("auto", "shared"))
    chosen = sync.best_transport() if transport == "auto" else transport
    moves = {"shared": sync.read_shared, "gathered": sync.read_gathered, "broadcast": sync.broadcast}
    written = moves[chosen]()
    if verify_checksums:
        sync.verify()
    return sync, chosen, written


# -- planning (pure) --------------------------------------------------------------------------------------------------


def make_plan(sources: Sequence[Layout], targets: Sequence[Layout], target_name: str) -> list[list[Piece]]:
    """Return the pieces that write every element of some target workers exactly once, for each worker.

    Args:
        sources: layouts of the workers of one copy of the source.
        targets: layouts of the workers that hold one copy of the target together. A worker may lack tensors that
            another holds.
        target_name: name of the target, for messages.

    Raises:
        WeightSyncError: a tensor is missing on one side, differs in shape, or is not covered.
    """
    aliases = sources[0].aliases
    held: dict[str, list[tuple[int, Place]]] = {}
    for index, layout in enumerate(sources):
        for name, place in layout.places.items():
            held.setdefault(name, []).append((index, place))
    wanted = dict.fromkeys(name for layout in targets for name in layout.places)
    missing = sorted(name for name in wanted if aliases.get(name, name) not in held)
    unexpected = sorted(held.keys() - {aliases.get(name, name) for name in wanted})
    if missing or unexpected:
        raise WeightSyncError(
            f"the source does not fit {target_name}: missing in the source: {missing[:5]} ({len(missing)}), "
            f"unknown to the target: {unexpected[:5]} ({len(unexpected)}). Are they the same model, tied alike?"
        )

    def pieces_of(name: str, place: Place) -> Iterator[Piece]:
        source_name = aliases.get(name, name)
        covered = 0
        for index, offered in held[source_name]:
            if offered.global_shape != place.global_shape:
                raise WeightSyncError(
                    f"{name}: {target_name} has shape {place.global_shape}, the source {offered.global_shape}"
                )
            overlap = _overlap(offered, place)
            if overlap is not None:
                yield Piece(name, source_name, index, *overlap, place.dtype)
                covered += math.prod(s.stop - s.start for s in overlap[0])
        if covered != math.prod(place.shape):
            raise WeightSyncError(
                f"{name}: the source's shards cover {covered} of the {math.prod(place.shape)} elements "
                f"that {target_name} holds; each must be written exactly once"
            )

    return [[piece for each in layout.places.items() for piece in pieces_of(*each)] for layout in targets]


def _overlap(source: Place, target: Place) -> tuple[Box, Box] | None:
    """Return the boxes that both places share, relative to each place; None if they share nothing."""
    own: list[slice] = []
    others: list[slice] = []
    places = zip(source.offset, source.shape, target.offset, target.shape, strict=True)
    for own_offset, own_size, offset, size in places:
        start, stop = max(own_offset, offset), min(own_offset + own_size, offset + size)
        if start >= stop:
            return None
        own.append(slice(start - own_offset, stop - own_offset))
        others.append(slice(start - offset, stop - offset))
    return tuple(own), tuple(others)


def make_buckets(layouts: Sequence[Layout], most_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Return every box of every source once, in broadcasts of at most `most_bytes` bytes.

    A larger box travels alone.
    """
    chosen: list[tuple[int, dict[str, Place]]] = []
    for index, layout in enumerate(layouts):
        num_bytes: float = math.inf  # no bucket has boxes of two sources
        for name, place in layout.places.items():
            size = aligned_bytes(place.shape, place.dtype)
            if num_bytes + size > most_bytes:
                chosen.append((index, {}))
                num_bytes = 0
            chosen[-1][1][name] = place
            num_bytes += size
    return tuple(Bucket(index, tuple(places), tuple(places.values())) for index, places in chosen)


# -- moving -----------------------------------------------------------------------------------------------------------


class Sync:
    """The layouts and the plan of one sync, and the ways to carry it out.

    Args:
        source: a train engine.
        target: an engine with memory for weights on its device.
        may_share: let a source on CPU describe its tensors with handles to its memory.

    Raises:
        WeightSyncError: a tensor does not match.
    """

    def __init__(self, source: Engine, target: Engine, may_share: bool) -> None:
        self.source, self.target = source, target
        self._members = target.members  # one that is lost from now on is missed by the calls on its ranks
        self._ranks = [rank for copy in self._members for rank in copy.ranks]
        """ranks of the target"""
        layouts = self._describe(may_share)
        sources = layouts[: len(source.group)]
        self.targets = dict(zip(self._ranks, layouts[len(source.group) :], strict=True))
        """by rank"""
        hosts = {layout.host for layout in self.targets.values()}
        near = [copy for copy in source.executors if {sources[rank].host for rank in copy.ranks} == hosts]
        self.copy = (near or source.executors)[0]
        """the source's replica on the target's machine if there is one, else the first"""
        self.offered = [sources[rank] for rank in self.copy.ranks]
        self.plan = self._plan(self.offered)
        """pieces by rank of the target"""

    def _describe(self, may_share: bool) -> list[Layout]:
        """Return the layouts of all workers of both engines, from one round of calls. A source on CPU adds handles.

        If one process holds all workers, its tensors need no handles that another process can open.
        """
        groups = [self.source.group, self.target.group]
        ranks = (range(len(self.source.group)), self._ranks)
        workers = [(group, rank) for group, of_one in zip(groups, ranks, strict=True) for rank in of_one]
        processes = {group.handles[rank].process for group, rank in workers}
        is_shared = may_share and len(processes) > 1 and can_share_memory() and groups[0].devices[0].kind == "cpu"
        calls = [
            (group, rank, (group.key(rank),), (group is groups[0], group is groups[0] and is_shared))
            for group, rank in workers
        ]
        return apply_on_processes(calls, describe, groups, "describe weights", groups[0].call_timeout)

    def _plan(self, offered: Sequence[Layout]) -> dict[int, list[Piece]]:
        plans: dict[int, list[Piece]] = {}
        for copy in self._members:
            layouts = [self.targets[rank] for rank in copy.ranks]
            plans |= zip(copy.ranks, known_plan(self.target, offered, layouts), strict=True)
        return plans

    @property
    def _layouts(self) -> list[Layout]:
        return [*self.offered, *self.targets.values()]

    @property
    def _is_staged_on_host(self) -> bool:
        return any(layout.device == "cpu" for layout in self._layouts)

    def best_transport(self) -> Transport:
        """Return the transport for the processes and devices of both engines.

        Raises:
            WeightSyncError: two processes that would broadcast share a GPU.
        """
        source, target, layouts = self.source.group, self.target.group, self._layouts
        if len({layout.process for layout in layouts}) == 1:
            return "shared"
        if source.devices[0].kind == "cpu":
            is_one_host = len({layout.host for layout in layouts}) == 1
            return "shared" if is_one_host and can_share_memory() else "broadcast"
        devices = [target.devices[rank] for rank in self._ranks]
        if set(devices) <= set(source.devices):  # whichever copy: NCCL refuses two processes on a GPU
            return "gathered"
        if self._is_staged_on_host:
            return "broadcast"
        senders = {source.devices[rank]: source.handles[rank].process for rank in self.copy.ranks}
        for device, handle in zip(devices, [target.handles[rank] for rank in self._ranks], strict=True):
            if senders.get(device, handle.process) != handle.process:
                raise WeightSyncError(
                    f"{target.name} shares {device} with {source.name}, but has other GPUs besides, and NCCL refuses "
                    "two processes on one GPU. Build them on the same devices (colocate_with), or on none in common "
                    "(not_colocate_with)"
                )
        return "broadcast"

    def read_shared(self) -> int:
        """Let the target read every piece in place, in the memory of the source's processes.

        Returns:
            The number of bytes written.
        """
        source, handles = self.source.group, [layout.handles for layout in self.offered]
        has_to_share = None in handles
        if has_to_share:
            readers = {layout.process for layout in self.targets.values()}
            handles = _apply(source, share, "share weights", self.copy.ranks, lambda rank: (None, False, readers))
        pieces = self.plan
        read_by = _apply(self.target.group, read, "read weights", self._ranks, lambda rank: (pieces[rank], handles))
        if has_to_share:
            _apply(source, unshare, "forget shared weights", self.copy.ranks)
        return sum(read_by)

    def read_gathered(self) -> int:
        """Gather whole tensors on every device, bucket by bucket; each target worker reads them on its own device.

        Returns:
            The number of bytes written.
        """
        source, target = self.source.group, self.target.group
        ranks = {device: rank for rank, device in enumerate(source.devices)}
        local = {rank: ranks[target.devices[rank]] for rank in self._ranks}
        whole: dict[str, Place] = {
            name: Place(place.dtype, (0,) * len(place.shape), place.global_shape, place.global_shape)
            for layout in self.offered
            for name, place in layout.places.items()
        }
        everything = Layout(whole, self.offered[0].host, self.offered[0].aliases)
        plan = self._plan([everything])
        written = 0
        for bucket in make_buckets([everything]):
            names = set(bucket.names)
            wanted = {rank: [piece for piece in plan[rank] if piece.source_name in names] for rank in self._ranks}
            readers = {local[rank]: [self.targets[rank].process] for rank, of_rank in wanted.items() if of_rank}
            offers = [(bucket.names, True, readers.get(rank, [])) for rank in range(len(source))]
            shared = _apply(source, share, "gather weights", None, offers.__getitem__)
            reads = {rank: (of_rank, [shared[local[rank]]]) for rank, of_rank in wanted.items()}
            written += sum(_apply(target, read, "read weights", self._ranks, reads.__getitem__))
        _apply(source, unshare, "forget shared weights")
        return written

    def broadcast(self) -> int:
        """Broadcast every source rank's boxes in one process group of both engines' processes.

        Returns:
            The number of bytes written.
        """
        source, target = self.source.group, self.target.group
        senders = {source.handles[rank].process: rank for rank in self.copy.ranks}
        receivers = {target.handles[rank].process: rank for rank in self._ranks if self.plan[rank]}
        processes = list(dict.fromkeys([*senders, *receivers]))
        plan = Broadcast(
            meeting=_meet(self.source, self.target, self.copy, tuple(processes)),
            buckets=make_buckets(self.offered),
            roots=tuple(processes.index(source.handles[rank].process) for rank in self.copy.ranks),
            is_on_host=self._is_staged_on_host,
        )
        calls = []
        for number, process in enumerate(processes):
            roles = (source, senders.get(process)), (target, receivers.get(process))
            group, rank = next((group, rank) for group, rank in roles if rank is not None)
            keys = tuple(None if rank is None else group.key(rank) for group, rank in roles)
            pieces = self.plan[receivers[process]] if process in receivers else []
            calls.append((group, rank, keys, (plan, number, pieces)))
        try:
            return sum(apply_on_processes(calls, take_part, [source, target], "weight sync", source.call_timeout))
        except BaseException:  # a process left in the middle of a broadcast must not take part in the next sync
            _part(source, target, self.copy.index)
            raise

    def verify(self) -> None:
        """Compare every piece at both ends, and look for non-finite weights.

        Raises:
            WeightSyncError: a piece differs, or arrived weights are not finite.
        """
        source, target, first = self.source.group, self.target.group, self.copy.ranks[0]
        pieces = [(to, piece) for to, of_rank in self.plan.items() for piece in of_rank]
        by_source = [[piece for _, piece in pieces if piece.source == index] for index in range(len(self.offered))]
        sent = _apply(source, checksums, "checksum", self.copy.ranks, lambda rank: (True, by_source[rank - first]))
        arrived = _apply(target, checksums, "checksum", self._ranks, lambda rank: (False, self.plan[rank]))
        left = dict(zip(self._ranks, map(iter, arrived), strict=True))
        expected = list(map(iter, sent))
        for to, piece in pieces:
            if next(left[to]) != next(expected[piece.source]):
                raise WeightSyncError(f"{piece.name} on {target.describe(to)} is not what {source.name} sent")
        found = _apply(target, lambda worker: nonfinite_names(worker.parameter_shards()), "look for NaN", self._ranks)
        for rank, names in zip(self._ranks, found, strict=True):
            if names:
                raise WeightSyncError(f"{target.describe(rank)} received weights that are not finite: {names[:3]}")


_plans: WeakKeyDictionary[Engine, list[tuple[Any, list[list[Piece]]]]] = WeakKeyDictionary()
"""the layouts and the pieces of each target's latest plans, which serve its equal replicas and the next sync"""
MOST_PLANS = 4


def known_plan(target: Engine, sources: Sequence[Layout], targets: Sequence[Layout]) -> list[list[Piece]]:
    """Return `make_plan` of these layouts, from memory if it is known. For many workers it takes seconds.

    Args:
        target: the engine whose workers receive the weights.
        sources: layouts of the workers that send.
        targets: layouts of the workers that receive.
    """
    plans, layouts = _plans.setdefault(target, []), (list(targets), list(sources))
    for known, pieces in plans:
        if known == layouts:
            return pieces
    plans.append((layouts, make_plan(sources, targets, target.name)))
    del plans[:-MOST_PLANS]
    return plans[-1][1]


_meetings: dict[tuple[WorkerGroup, WorkerGroup, int], tuple[tuple[Any, ...], Meeting]] = {}
"""the process group between two engines and its processes, by the source's copy. It lives until either engine is
released, or until other processes take part"""


def _meet(source: Engine, target: Engine, copy: Executor, processes: tuple[Any, ...]) -> Meeting:
    key = (source.group, target.group, copy.index)
    if key in _meetings and _meetings[key][0] != processes:
        _part(*key)
    if key not in _meetings:
        ip, timeout = source.group.devices[copy.ranks[0]].ip, source.group.call_timeout
        call = (source.group, copy.ranks[0], (), (ip,))
        (port,) = apply_on_processes([call], open_store, [source.group], "open a rendezvous", timeout)
        _meetings[key] = processes, Meeting(ip, port, len(processes), timeout)
        for engine in (source, target):
            current_session().before_release(engine.name, partial(_part, *key))
    return _meetings[key][1]


def _part(source: WorkerGroup, target: WorkerGroup, copy: int) -> None:
    """End the process group between two engines in every process that still serves."""
    if (source, target, copy) not in _meetings:
        return
    _, meeting = _meetings.pop((source, target, copy))
    serving = [(group, rank) for group in (source, target) for rank in range(len(group)) if group.is_serving(rank)]
    with suppress(RliteError):  # who died, or is stuck, takes the process group along
        on_each_process(serving, leave_meeting, (meeting,), "leave weight sync", PART_S)


def _apply(
    group: WorkerGroup, function: Any, what: str, ranks: Sequence[int] | None = None, args_of: Any = lambda rank: ()
) -> list[Any]:
    """Return the results of `function(worker, *args_of(rank))` on workers of one group."""
    chosen = range(len(group)) if ranks is None else ranks
    calls = [(group, rank, (group.key(rank),), args_of(rank)) for rank in chosen]
    return apply_on_processes(calls, function, [group], what, group.call_timeout)
