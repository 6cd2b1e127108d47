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
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rlite.cluster.group import WorkerGroup, apply_on_processes
from rlite.cluster.session import current_session
from rlite.engine.base import Engine, Weights
from rlite.engine.transport import (
    Broadcast,
    Bucket,
    Layout,
    Meeting,
    Piece,
    Place,
    describe,
    leave_meeting,
    nonfinite_weights,
    read,
    share,
    source_checksums,
    take_part,
    target_checksums,
    unshare,
)
from rlite.engine.workers import Executor
from rlite.errors import ConfigError, ResidencyError, RliteError, WeightSyncError
from rlite.observability import trace
from rlite.parallel.arena import can_share_memory
from rlite.parallel.processes import open_store
from rlite.parallel.shards import Box

OnInflight = Literal["continue", "abort"]
Transport = Literal["auto", "shared", "gathered", "broadcast"]
Plans = list[list[Piece]]
"""[target rank][piece]"""
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
    """
    if on_inflight not in ("continue", "abort"):
        raise ConfigError(f"on_inflight={on_inflight!r}: expected 'continue' or 'abort'")
    if target is source:
        raise ConfigError(f"{source.name} cannot be synced with itself")
    if not target.is_built or target.weights not in (Weights.DEVICE, Weights.EMPTY):
        raise ResidencyError(
            f"the target {target.name or target.kind} has no memory for weights: "
            'call build(), or cuda("weights"), first'
        )
    started = time.perf_counter()
    with trace.span("weight sync", source=source.name, target=target.name), target.receiving_weights(on_inflight):
        sources, targets = _describe(source, target, may_share=transport in ("auto", "shared"))
        copy = _nearest_copy(source, sources, targets)
        offered = [sources[rank] for rank in copy.ranks]
        plan = _plans(offered, target, targets)
        chosen = _transport(source, target, copy, offered, targets) if transport == "auto" else transport
        move = {"shared": _read_shared, "gathered": _read_gathered, "broadcast": _broadcast}[chosen]
        written = move(source, target, copy, offered, targets, plan)
        if verify_checksums:
            _verify(source, target, copy, targets, plan)
        for rank, names in (
            enumerate(_apply(target.group, nonfinite_weights, "look for NaN")) if verify_checksums else ()
        ):
            if names:
                raise WeightSyncError(
                    f"{target.group.describe(rank)} received weights that are not finite: {names[:3]}"
                )
    return SyncReport(
        version=target.get_version(),
        num_bytes=written,
        seconds=time.perf_counter() - started,
        transport=chosen,
        num_tensors=len(set().union(*(layout.places for layout in targets))),
    )


# -- planning (pure) --------------------------------------------------------------------------------------------------


def make_plan(sources: Sequence[Layout], target: Layout, target_name: str, peers: Sequence[Layout] = ()) -> list[Piece]:
    """Return the pieces that write every element of one target worker exactly once.

    Args:
        sources: layouts of the workers of one copy of the source.
        target: layout of one worker of the target.
        target_name: name of the target, for messages.
        peers: layouts of workers that hold one copy of the target together. A worker may lack tensors that another
            holds.

    Raises:
        WeightSyncError: a tensor is missing on one side, differs in shape, or is not covered.
    """
    aliases = sources[0].aliases
    known = set().union(*(layout.places for layout in sources))
    missing = sorted(name for name in target.places if aliases.get(name, name) not in known)
    used = {aliases.get(name, name) for layout in (target, *peers) for name in layout.places}
    unexpected = sorted(known - used)
    if missing or unexpected:
        raise WeightSyncError(
            f"the source does not fit {target_name}: missing in the source: {missing[:5]} ({len(missing)}), "
            f"unknown to the target: {unexpected[:5]} ({len(unexpected)}). Are they the same model, tied alike?"
        )
    pieces = []
    for name, place in target.places.items():
        source_name = aliases.get(name, name)
        covered = 0
        for index, layout in enumerate(sources):
            held = layout.places.get(source_name)
            if held is None:
                continue
            if held.global_shape != place.global_shape:
                raise WeightSyncError(
                    f"{name}: {target_name} has shape {place.global_shape}, the source {held.global_shape}"
                )
            overlap = _overlap(held, place)
            if overlap is not None:
                pieces.append(Piece(name, source_name, index, *overlap))
                covered += math.prod(s.stop - s.start for s in overlap[0])
        if covered != math.prod(place.shape):
            raise WeightSyncError(
                f"{name}: the source's shards cover {covered} of the {math.prod(place.shape)} elements "
                f"that {target_name} holds; each must be written exactly once"
            )
    return pieces


def _plans(sources: Sequence[Layout], target: Engine, targets: Sequence[Layout]) -> Plans:
    copies = [[targets[rank] for rank in copy.ranks] for copy in target.executors]
    return [make_plan(sources, layout, target.name, peers) for peers in copies for layout in peers]


def _overlap(source: Place, target: Place) -> tuple[Box, Box] | None:
    """Return the boxes that both places share, relative to each place; None if they share nothing."""
    low = [max(a, b) for a, b in zip(source.offset, target.offset, strict=True)]
    high = [min(a, b) for a, b in zip(source.end, target.end, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    boxes = [
        tuple(slice(a - o, b - o) for a, b, o in zip(low, high, place.offset, strict=True))
        for place in (source, target)
    ]
    return boxes[0], boxes[1]


def make_buckets(layouts: Sequence[Layout], most_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Return every box of every source once, in broadcasts of at most `most_bytes` bytes.

    A larger box travels alone.
    """
    buckets = []
    for index, layout in enumerate(layouts):
        bucket = Bucket(index, (), ())
        for name, place in layout.places.items():
            one = Bucket(index, (name,), (place,))
            if bucket.names and bucket.nbytes + one.nbytes > most_bytes:
                buckets.append(bucket)
                bucket = Bucket(index, (), ())
            bucket = Bucket(index, (*bucket.names, name), (*bucket.places, place))
        if bucket.names:
            buckets.append(bucket)
    return tuple(buckets)


def _nearest_copy(source: Engine, sources: Sequence[Layout], targets: Sequence[Layout]) -> Executor:
    """Return the source's replica on the target's machine if there is one, else the first."""
    hosts = {layout.host for layout in targets}
    near = [copy for copy in source.executors if {sources[rank].host for rank in copy.ranks} == hosts]
    return near[0] if near else source.executors[0]


def _transport(
    source: Engine, target: Engine, copy: Executor, offered: Sequence[Layout], targets: Sequence[Layout]
) -> Transport:
    if len({layout.process for layout in [*offered, *targets]}) == 1:
        return "shared"
    one_host = len({layout.host for layout in [*offered, *targets]}) == 1
    devices = [source.group.devices[rank] for rank in copy.ranks]
    if devices[0].kind == "cpu":
        return "shared" if one_host and can_share_memory() else "broadcast"
    if set(target.group.devices) <= set(source.group.devices):  # whichever copy: NCCL refuses two processes on a GPU
        return "gathered"
    _check_apart(source, target, copy)
    return "broadcast"


def _check_apart(source: Engine, target: Engine, copy: Executor) -> None:
    """Check that no two processes that would broadcast share a GPU.

    Raises:
        WeightSyncError: two processes share a GPU.
    """
    senders = {source.group.devices[rank]: source.group.handles[rank].process for rank in copy.ranks}
    for device, handle in zip(target.group.devices, target.group.handles, strict=True):
        if senders.get(device, handle.process) != handle.process:
            raise WeightSyncError(
                f"{target.name} shares {device} with {source.name}, but has other GPUs besides, and NCCL refuses two "
                "processes on one GPU. Build them on the same devices (colocate_with), or on none in common "
                "(not_colocate_with)"
            )


# -- moving -----------------------------------------------------------------------------------------------------------


def _read_shared(
    source: Engine, target: Engine, copy: Executor, offered: list[Layout], targets: list[Layout], plan: Plans
) -> int:
    handles = own = [layout.handles for layout in offered]
    if any(handle is None for handle in handles):
        readers = {layout.process for layout in targets}
        handles = _apply(source.group, share, "share weights", copy.ranks, lambda rank: (None, False, readers))
    written = sum(_apply(target.group, read, "read weights", None, lambda rank: (plan[rank], handles)))
    if handles is not own:
        _apply(source.group, unshare, "forget shared weights", copy.ranks)
    return written


def _read_gathered(
    source: Engine, target: Engine, copy: Executor, offered: list[Layout], targets: list[Layout], plan: Plans
) -> int:
    """Gather whole tensors on every device, bucket by bucket; each target worker reads them on its own device.

    Returns:
        The number of bytes written.
    """
    ranks = {source.group.devices[rank]: rank for rank in range(len(source.group))}
    local = [ranks[device] for device in target.group.devices]
    whole: dict[str, Place] = {
        name: Place(place.dtype, (0,) * len(place.shape), place.global_shape, place.global_shape)
        for layout in offered
        for name, place in layout.places.items()
    }
    everything = Layout(whole, offered[0].host, offered[0].aliases)
    pieces = _plans([everything], target, targets)
    written = 0
    for bucket in make_buckets([everything]):
        names = set(bucket.names)
        wanted = [[piece for piece in of_rank if piece.source_name in names] for of_rank in pieces]
        readers = {local[rank]: [targets[rank].process] for rank, of_rank in enumerate(wanted) if of_rank}
        offers = [(bucket.names, True, readers.get(rank, [])) for rank in range(len(source.group))]
        shared = _apply(source.group, share, "gather weights", None, offers.__getitem__)
        reads = [(of_rank, [shared[local[rank]]]) for rank, of_rank in enumerate(wanted)]
        written += sum(_apply(target.group, read, "read weights", None, reads.__getitem__))
    _apply(source.group, unshare, "forget shared weights")
    return written


def _broadcast(
    source: Engine, target: Engine, copy: Executor, offered: list[Layout], targets: list[Layout], plan: Plans
) -> int:
    """Broadcast every source rank's boxes in one process group of both engines' processes.

    Returns:
        The number of bytes written.
    """
    senders = {source.group.handles[rank].process: rank for rank in copy.ranks}
    receivers = {handle.process: rank for rank, handle in enumerate(target.group.handles) if plan[rank]}
    processes = list(dict.fromkeys([*senders, *receivers]))
    first = copy.ranks[0]
    meeting = Broadcast(
        meeting=_meet(source, target, copy, len(processes)),
        buckets=make_buckets(offered),
        roots=tuple(processes.index(source.group.handles[rank].process) for rank in copy.ranks),
    )
    calls = []
    for number, process in enumerate(processes):
        source_rank, target_rank = senders.get(process), receivers.get(process)
        group, rank = (source.group, source_rank) if source_rank is not None else (target.group, target_rank)
        keys = (
            None if source_rank is None else source.group.key(source_rank),
            None if target_rank is None else target.group.key(target_rank),
        )
        args = (
            meeting,
            number,
            None if source_rank is None else source_rank - first,
            [] if target_rank is None else plan[target_rank],
        )
        assert rank is not None  # every process hosts one or the other
        calls.append((group, rank, keys, args))
    groups = [source.group, target.group]
    try:
        return sum(apply_on_processes(calls, take_part, groups, "weight sync", source.group.call_timeout))
    except BaseException:  # whoever was left in the middle of a broadcast must not take part in the next sync
        _part(source.group, target.group, copy.index)
        raise


_meetings: dict[tuple[WorkerGroup, WorkerGroup, int], Meeting] = {}
"""the process group between two engines, by the source's copy; it lives until either engine is released"""


def _meet(source: Engine, target: Engine, copy: Executor, size: int) -> Meeting:
    key = (source.group, target.group, copy.index)
    if key not in _meetings:
        ip, timeout = source.group.devices[copy.ranks[0]].ip, source.group.call_timeout
        call = (source.group, copy.ranks[0], (), (ip,))
        (port,) = apply_on_processes([call], open_store, [source.group], "open a rendezvous", timeout)
        _meetings[key] = Meeting(ip, port, size, timeout)
        for engine in (source, target):
            current_session().before_release(engine.name, partial(_part, *key))
    return _meetings[key]


def _part(source: WorkerGroup, target: WorkerGroup, copy: int) -> None:
    """End the process group between two engines in every process that still serves."""
    meeting = _meetings.pop((source, target, copy), None)
    if meeting is None:
        return
    serving = {
        g.handles[rank].process: (g, rank) for g in (source, target) for rank in range(len(g)) if g.is_serving(rank)
    }
    calls = [(group, rank, (), (meeting,)) for group, rank in serving.values()]
    groups = list(dict.fromkeys(group for group, _ in serving.values()))
    with suppress(RliteError):  # who died, or is stuck, takes the process group along
        apply_on_processes(calls, leave_meeting, groups, "leave weight sync", PART_S)


def _verify(source: Engine, target: Engine, copy: Executor, targets: Sequence[Layout], plan: Plans) -> None:
    by_source: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank, pieces in enumerate(plan):
        for number, piece in enumerate(pieces):
            by_source[piece.source].append((rank, number))

    def wanted(rank: int) -> tuple[list[Piece], list[Any]]:
        chosen = by_source[rank - copy.ranks[0]]
        pieces = [plan[r][n] for r, n in chosen]
        return pieces, [targets[r].places[piece.name].dtype for (r, _), piece in zip(chosen, pieces, strict=True)]

    sent = _apply(source.group, source_checksums, "checksum", copy.ranks, wanted)
    arrived = _apply(target.group, target_checksums, "checksum", None, lambda rank: (plan[rank],))
    for index, sums in enumerate(sent):
        for (rank, number), expected in zip(by_source[index], sums, strict=True):
            if arrived[rank][number] != expected:
                name = plan[rank][number].name
                raise WeightSyncError(f"{name} on {target.group.describe(rank)} is not what {source.name} sent")


def _describe(source: Engine, target: Engine, may_share: bool) -> tuple[list[Layout], list[Layout]]:
    """Return the layouts of all workers of both engines, from one round of calls. A source on CPU adds handles.

    If one process holds all workers, its tensors need no handles that another process can open.
    """
    processes = {handle.process for engine in (source, target) for handle in engine.group.handles}
    is_shared = may_share and len(processes) > 1 and can_share_memory() and source.group.devices[0].kind == "cpu"
    calls = [
        (engine.group, rank, (engine.group.key(rank),), (engine is source, is_shared))
        for engine in (source, target)
        for rank in range(len(engine.group))
    ]
    timeout = source.group.call_timeout
    layouts = apply_on_processes(calls, describe, [source.group, target.group], "describe weights", timeout)
    return layouts[: len(source.group)], layouts[len(source.group) :]


def _apply(
    group: WorkerGroup, function: Any, what: str, ranks: Sequence[int] | None = None, args_of: Any = lambda rank: ()
) -> list[Any]:
    """Return the results of `function(worker, *args_of(rank))` on workers of one group."""
    chosen = range(len(group)) if ranks is None else ranks
    calls = [(group, rank, (group.key(rank),), args_of(rank)) for rank in chosen]
    return apply_on_processes(calls, function, [group], what, group.call_timeout)
