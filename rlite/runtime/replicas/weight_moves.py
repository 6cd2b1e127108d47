"""The driver side of moving weights: calls of the transport's functions in the processes of both ends.

read_shared     the target reads each piece in place, in the memory of the source's processes
read_gathered   whole tensors are gathered on every device, bucket by bucket, and read there
broadcast       boxes travel in buckets, in a process group of both engines
verify          digests of both ends are compared: of what arrived, and of what is served afterwards
copy_weights    a replica that serves hands its weights to one that joins, rank by rank
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from textwrap import shorten
from types import SimpleNamespace
from typing import Any

from rlite.errors import RliteError, WeightSyncError, WorkerError
from rlite.runtime.cluster.group import WorkerGroup, apply_on_processes
from rlite.runtime.cluster.session import current_session
from rlite.runtime.parallel.processes import open_store
from rlite.runtime.parallel.shards import nonfinite_names
from rlite.runtime.replicas import transport
from rlite.runtime.replicas.digests import Digest, Served, held_digests, sent_digests
from rlite.runtime.replicas.engine import Engine, Weights
from rlite.runtime.replicas.transport import Broadcast, Layout, Meeting, Piece, Place, make_buckets
from rlite.runtime.replicas.workers import Worker, WorkerSet, on_each_process
from rlite.wording import warn_once

logger = logging.getLogger(__name__)
LEAVE_S = 10.0
"""time limit in seconds for a process to leave a process group"""

Plan = dict[int, list[Piece]]
"""the pieces of each rank of the target"""


@dataclass(frozen=True)
class Route:
    """Both ends of a move: one copy of the source, and the ranks of the target."""

    source: WorkerGroup
    copy: WorkerSet
    """the workers that send"""
    offered: list[Layout]
    """layouts of the workers that send"""
    target: WorkerGroup
    targets: dict[int, Layout]
    """layouts of the workers that receive, by rank"""

    @property
    def layouts(self) -> list[Layout]:
        """The layouts at both ends."""
        return [*self.offered, *self.targets.values()]

    @property
    def is_staged_on_host(self) -> bool:
        """True if a process has its tensors in host memory."""
        return any(layout.device == "cpu" for layout in self.layouts)


def read_shared(route: Route, plan: Plan) -> int:
    """Let the target read every piece in place, in the memory of the source's processes.

    Returns the number of bytes written.
    """
    handles = [layout.handles for layout in route.offered]
    has_to_share = None in handles
    if has_to_share:
        offer = ({layout.process for layout in route.targets.values()},)
        handles = _apply(route.source, transport.share, "share weights", route.copy.ranks, lambda rank: offer)
    read_by = _apply(route.target, transport.read, "read weights", route.targets, lambda rank: (plan[rank], handles))
    if has_to_share:
        _apply(route.source, transport.unshare, "forget shared weights", route.copy.ranks)
    return sum(read_by)


def read_gathered(route: Route, plan_of: Callable[[Sequence[Layout]], Plan]) -> int:
    """Gather whole tensors on every device, bucket by bucket; each target worker reads them on its own device.

    Returns the number of bytes written.
    """
    source, target = route.source, route.target
    ranks = {device: rank for rank, device in enumerate(source.devices)}
    local = {rank: ranks[target.devices[rank]] for rank in route.targets}
    everything = Layout(_whole_places(route), route.offered[0].host, route.offered[0].aliases)
    plan = plan_of([everything])
    written = 0
    for bucket in make_buckets([everything]):
        wanted = {rank: [piece for piece in plan[rank] if piece.source_name in bucket.places] for rank in route.targets}
        readers = {local[rank]: [route.targets[rank].process] for rank, of_rank in wanted.items() if of_rank}
        offers = [(bucket.places, readers.get(rank, [])) for rank in range(len(source))]
        shared = _apply(source, transport.gather, "gather weights", None, offers.__getitem__)
        reads = {rank: (of_rank, [shared[local[rank]]]) for rank, of_rank in wanted.items()}
        written += sum(_apply(target, transport.read, "read weights", route.targets, reads.__getitem__))
    _apply(source, transport.unshare, "forget shared weights")
    return written


def _whole_places(route: Route) -> dict[str, Place]:
    """Return every tensor of the source whole, in the dtype that all targets want if it is narrower."""
    aliases, dtypes = route.offered[0].aliases, dict[str, set[Any]]()
    for name, place in chain.from_iterable(layout.places.items() for layout in route.targets.values()):
        dtypes.setdefault(aliases.get(name, name), set()).add(place.dtype)
    whole = {}
    for name, place in chain.from_iterable(layout.places.items() for layout in route.offered):
        dtype, *others = dtypes.get(name, {place.dtype})
        is_narrower = not others and dtype.itemsize < place.dtype.itemsize
        shape = place.global_shape
        whole[name] = Place(dtype if is_narrower else place.dtype, (0,) * len(shape), shape, shape)
    return whole


def broadcast(route: Route, plan: Plan) -> int:
    """Broadcast every source rank's boxes in one process group of both engines' processes.

    Returns the number of bytes written.
    """
    source, target, timeout = route.source, route.target, route.source.call_timeout
    senders = {source.handles[rank].process: rank for rank in route.copy.ranks}
    receivers = {target.handles[rank].process: rank for rank in route.targets if plan[rank]}
    processes = list(dict.fromkeys([*senders, *receivers]))
    sent = Broadcast(
        meeting=_meet(source, target, route.copy, tuple(processes)),
        buckets=make_buckets(route.offered),
        roots=tuple(processes.index(source.handles[rank].process) for rank in route.copy.ranks),
        is_on_host=route.is_staged_on_host,
    )
    calls = []
    for number, process in enumerate(processes):
        roles = (source, senders.get(process)), (target, receivers.get(process))
        group, rank = next((group, rank) for group, rank in roles if rank is not None)
        keys = tuple(None if rank is None else group.key(rank) for group, rank in roles)
        pieces = plan[receivers[process]] if process in receivers else []
        calls.append((group, rank, keys, (sent, number, pieces)))
    try:
        return sum(apply_on_processes(calls, transport.take_part, [source, target], "weight sync", timeout))
    except BaseException:  # a process left in the middle of a broadcast must not take part in the next sync
        _part(source, target, route.copy.index)
        raise


def verify(route: Route, plan: Plan) -> None:
    """Compare every piece at both ends before another program reads it, and look for non-finite weights."""
    target = route.target
    _compare(route, plan, route.targets, is_served=False)
    wrong = _apply(target, lambda worker: nonfinite_names(worker.parameter_shards()), "look for NaN", route.targets)
    for rank, names in zip(route.targets, wrong, strict=True):
        if names:
            raise WeightSyncError(f"{target.describe(rank)} received weights that are not finite: {names[:3]}")


def prove(route: Route, plan: Plan, target: Engine) -> None:
    """Compare what an engine serves after a sync with what was sent. What is not compared is told once.

    `target`: the engine, which gets a `proof`. It refuses to serve if it serves something else.
    """
    members, last, target.proof = target.members, target.proof, None
    ranks = [rank for copy in members for rank in copy.ranks if rank in route.targets]
    try:
        served, sent = _compare(route, plan, ranks, is_served=True, version=target.get_version())
        target.proof = sent, known = sent, [each.checksums for each in served]
        if any(known) and last is not None and last[0] != sent and last[1] == known:
            told = "the checksums are those of the last verified sync, and other weights were sent since"
            raise WeightSyncError(f"{target.name} does not serve what {route.source.name} sent: {told}")
    except WorkerError:  # its successor gets its weights from another replica
        if not target.has_lost_some_of(members):
            raise
        return prove(route, plan, target)
    except WeightSyncError:
        target.weights = Weights.EMPTY
        raise
    for limit in {answer.limit for answer in served if answer.limit}:
        parts = chain(*(zip(plan[rank], each.digests, strict=True) for rank, each in zip(ranks, served, strict=True)))
        names = _listed({piece.name for piece, digests in parts if not digests})
        warn_once(logger, f"verified weight syncs into {target.executor_name!r}: {limit}: {names}")


def _compare(
    route: Route, plan: Plan, ranks: Iterable[int], is_served: bool, version: int | None = None
) -> tuple[list[Served], str]:
    """Return the answers of the receiving workers, and a digest of what was sent to them."""
    source, target, first = route.source, route.target, route.copy.ranks[0]
    answers = _apply(target, held_digests, "digest weights", ranks, lambda rank: (plan[rank], is_served))
    asked: list[dict[Any, Any]] = [{} for _ in route.offered]
    found, wrong = [], defaultdict(set)
    for rank, answer in zip(ranks, answers, strict=True):
        if answer.version not in (None, version):
            wrong[rank].add(f"version {answer.version} in place of {version}")
        for name, checksum in answer.checksums.items():
            if checksum != answers[0].checksums.get(name, checksum):
                wrong[rank].add(f"{name}, of which the first replica has another checksum")
        for piece, digests in zip(plan[rank], answer.digests, strict=False):  # equal replicas have the same pieces
            for sha256, part, is_computed in digests or [Digest(b"")]:
                asked[piece.source][key := (id(piece), repr(part), is_computed)] = piece, part, is_computed
                found.append((rank, piece.name, key, sha256))
    blocks = [[*each.values()] for each in asked]
    sent = _apply(source, sent_digests, "digest weights", route.copy.ranks, lambda rank: (blocks[rank - first],))
    expected = dict(chain(*(zip(keys, of_rank, strict=True) for keys, of_rank in zip(asked, sent, strict=True))))
    for rank, name, key, sha256 in found:
        if sha256 not in (b"", expected[key]):
            wrong[rank].add(name)
    if wrong:
        told = "; ".join(f"{_listed(names)} on {target.describe(rank)}" for rank, names in wrong.items())
        raise WeightSyncError(f"{told} is not what {source.name} sent{', as it is served' if is_served else ''}")
    return answers, hashlib.sha256(b"".join(chain(*sent))).hexdigest()


def _listed(names: Collection[str]) -> str:
    """Return names in order, as far as there is room, and their number."""
    return shorten(", ".join(sorted(names)), 2000) + (f" ({len(names)})" if len(names) > 1 else "")


_meetings: dict[tuple[WorkerGroup, WorkerGroup, int], tuple[tuple[Any, ...], Meeting]] = {}
"""the process group between two engines and its processes, by the source's copy. It lives until either engine is
released, or until other processes take part"""


def _meet(source: WorkerGroup, target: WorkerGroup, copy: WorkerSet, processes: tuple[Any, ...]) -> Meeting:
    key = (source, target, copy.index)
    if key not in _meetings or _meetings[key][0] != processes:
        _part(*key)
        _meetings[key] = processes, _open_meeting(source, copy.ranks[0], len(processes), source.call_timeout)
        for group in (source, target):
            current_session().before_release(group.name, partial(_part, *key))
    return _meetings[key][1]


def _open_meeting(group: WorkerGroup, rank: int, size: int, timeout: float) -> Meeting:
    """Return a rendezvous in the process of a rank."""
    ip = group.devices[rank].ip
    (port,) = apply_on_processes([(group, rank, (), (ip,))], open_store, [group], "open a rendezvous", timeout)
    return Meeting(ip, port, size, group.call_timeout)


def _part(source: WorkerGroup, target: WorkerGroup, copy: int) -> None:
    """End the process group between two engines in every process that still serves."""
    if (known := _meetings.pop((source, target, copy), None)) is not None:
        _leave([(group, rank) for group in (source, target) for rank in range(len(group))], known[1])


def _leave(workers: Sequence[tuple[WorkerGroup, int]], meeting: Meeting) -> None:
    serving = [(group, rank) for group, rank in workers if group.is_serving(rank)]
    with suppress(RliteError):  # who died, or is stuck, takes the process group along
        on_each_process(serving, transport.leave_meeting, (meeting,), "leave weight sync", LEAVE_S)


def _apply(
    group: WorkerGroup, function: Any, what: str, ranks: Iterable[int] | None = None, args_of: Any = lambda rank: ()
) -> list[Any]:
    """Return the results of `function(worker, *args_of(rank))` on workers of one group."""
    chosen = range(len(group)) if ranks is None else ranks
    calls = [(group, rank, (group.key(rank),), args_of(rank)) for rank in chosen]
    return apply_on_processes(calls, function, [group], what, group.call_timeout)


# -- from one replica to another ---------------------------------------------------------------------------------------


def copy_weights(source: WorkerSet, target: WorkerSet) -> int:
    """Copy the weights of a replica that serves into one that does not yet. Each source worker pauses for a bucket.

    Returns the number of bytes written.
    """
    group = source.group
    pairs = list(zip(source.ranks, target.ranks, strict=True))
    plans = [_pair_plan(group, *pair) for pair in pairs]
    try:
        written = 0
        for buckets in zip_longest(*(plan.buckets for plan, _ in plans)):
            calls: list[Any] = []
            for (giver, taker), (plan, pieces), bucket in zip(pairs, plans, buckets, strict=True):
                if bucket is not None:
                    part = replace(plan, buckets=(bucket,)), [p for p in pieces if p.source_name in bucket.places]
                    calls.append((group, giver, (group.key(giver), None), part))
                    calls.append((group, taker, (None, group.key(taker)), part))
            written += sum(apply_on_processes(calls, hand_over, [group], "copy weights", group.call_timeout))
        return written
    finally:
        for pair, (plan, _) in zip(pairs, plans, strict=True):
            _leave([(group, rank) for rank in pair], plan.meeting)


def hand_over(giver: Worker | None, taker: Worker | None, plan: Broadcast, pieces: list[Piece]) -> int:
    """Send, or receive, one bucket.

    Returns the number of bytes written.
    """
    shards = None if giver is None else giver.parameter_shards
    source: Any = shards and SimpleNamespace(parameter_shards=shards, served_shards=shards)  # of its own weights
    return transport.take_part(source, taker, plan, 0 if taker is None else 1, pieces if taker is not None else [])


def _pair_plan(group: WorkerGroup, giver: int, taker: int) -> tuple[Broadcast, list[Piece]]:
    """Return the buckets and pieces of everything that two workers of equal rank hold."""
    offered, wanted = _apply(group, transport.describe, "describe weights", (giver, taker), lambda _: (False, False))
    if offered != wanted:
        raise WeightSyncError(f"{group.describe(taker)} does not hold the same parts as {group.describe(giver)}")
    is_on_host = "cpu" in (offered.device, wanted.device)
    meeting = _open_meeting(group, giver, 2, 60.0)
    boxes = {name: tuple(slice(0, size) for size in place.shape) for name, place in offered.places.items()}
    pieces = [Piece(name, name, 0, box, box, offered.places[name].dtype) for name, box in boxes.items()]
    return Broadcast(meeting, make_buckets([offered]), roots=(0,), is_on_host=is_on_host), pieces
