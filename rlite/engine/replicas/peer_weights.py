"""Weights from one replica to another that joins it: rank by rank, bucket by bucket, while the first replica serves."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

from rlite.cluster.group import WorkerGroup, apply_on_processes
from rlite.engine.transport import Broadcast, Bucket, Layout, Meeting, Piece, describe, leave_meeting, take_part
from rlite.engine.weight_sync import make_buckets, make_plan
from rlite.engine.workers import Executor, Worker, on_each_process
from rlite.errors import RliteError
from rlite.parallel.processes import open_store

LEAVE_S = 10.0
"""time limit in seconds for a process to leave a process group"""


def copy_weights(source: Executor, target: Executor) -> int:
    """Copy the weights of a replica that serves into one that does not yet. Each source worker pauses for a bucket.

    Args:
        source: workers of the one replica.
        target: workers of the other one, of the same group and as many.

    Returns:
        The number of bytes written.
    """
    group = source.group
    pairs = list(zip(source.ranks, target.ranks, strict=True))
    layouts = _layouts(group, pairs)
    plans = [_plan(group, pair, *of_pair) for pair, of_pair in zip(pairs, layouts, strict=True)]
    try:
        written = 0
        for buckets in zip_longest(*(plan.buckets for plan, _ in plans)):
            calls: list[Any] = []
            for (giver, taker), (plan, pieces), bucket in zip(pairs, plans, buckets, strict=True):
                if bucket is not None:
                    part = _part_of(plan, pieces, bucket)
                    calls.append((group, giver, (group.key(giver), None), part))
                    calls.append((group, taker, (None, group.key(taker)), part))
            written += sum(apply_on_processes(calls, hand_over, [group], "copy weights", group.call_timeout))
        return written
    finally:
        for pair, (plan, _) in zip(pairs, plans, strict=True):
            with suppress(RliteError):  # who died takes the process group along
                serving = [(group, rank) for rank in pair if group.is_serving(rank)]
                on_each_process(serving, leave_meeting, (plan.meeting,), "leave", LEAVE_S)


def hand_over(giver: Worker | None, taker: Worker | None, plan: Broadcast, pieces: list[Piece]) -> int:
    """Send, or receive, one bucket.

    Args:
        giver: the worker that serves, in its process.
        taker: the worker that joins, in its process.
        plan: the bucket and the process group.
        pieces: pieces of the bucket.

    Returns:
        The number of bytes written.
    """
    shards = None if giver is None else giver.parameter_shards
    source: Any = shards and SimpleNamespace(parameter_shards=shards, served_shards=shards)  # of its own weights
    return take_part(source, taker, plan, 0 if taker is None else 1, pieces if taker is not None else [])


def _part_of(plan: Broadcast, pieces: list[Piece], bucket: Bucket) -> tuple[Broadcast, list[Piece]]:
    return replace(plan, buckets=(bucket,)), [piece for piece in pieces if piece.source_name in bucket.names]


def _plan(group: WorkerGroup, pair: tuple[int, int], giver: Layout, taker: Layout) -> tuple[Broadcast, list[Piece]]:
    ip = group.devices[pair[0]].ip
    (port,) = apply_on_processes([(group, pair[0], (), (ip,))], open_store, [group], "open a rendezvous", 60.0)
    is_on_host = "cpu" in (giver.device, taker.device)
    meeting = Meeting(ip, port, 2, group.call_timeout)
    plan = Broadcast(meeting, make_buckets([giver]), roots=(0,), is_on_host=is_on_host)
    (pieces,) = make_plan([giver], [taker], group.describe(pair[1]))
    return plan, pieces


def _layouts(group: WorkerGroup, pairs: list[tuple[int, int]]) -> list[Any]:
    """Return the layouts of the weights of each pair of ranks."""
    calls: list[Any] = [(group, rank, (group.key(rank),), (False, False)) for pair in pairs for rank in pair]
    results = apply_on_processes(calls, describe, [group], "describe weights", group.call_timeout)
    return list(zip(results[::2], results[1::2], strict=True))
