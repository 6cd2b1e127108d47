"""Rollouts that run ahead of training: the wait for the oldest groups, and the items that keep the queue full."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from rlite.errors import CallTimeout, ConfigError, DataError, RolloutError
from rlite.rollout.collector.ledger import RolloutLedger
from rlite.rollout.collector.lost_groups import held_up
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.runner import Group, GroupRunner, Item, Queue
from rlite.runtime.event_loop import deadline_after
from rlite.types import AsyncInference

NUM_NAMED = 5
"""groups or reasons that a message lists"""


def make_queues(options: CollectorOptions, version: int) -> tuple[Queue, Queue, Queue]:
    """Return the queues of a collector in order of precedence: groups to train on now, to measure, and run ahead."""
    limit = options.max_concurrent_rollouts
    ahead = RolloutLedger(
        max_concurrent=limit,
        max_head_offpolicyness=options.max_head_offpolicyness,
        on_stale=options.on_stale,
        batch_size=options.consumer_batch_size,
        version=version,
    )
    # no step trains while `collect` or `evaluate` waits, so that their groups do not age
    now, tests = (RolloutLedger(max_concurrent=limit) for _ in range(2))
    return Queue(now), Queue(tests, is_training=False), Queue(ahead)


class AheadOfTraining:
    """Takes batches out of the queue of groups that run ahead of training, in the callers' threads."""

    def __init__(self, queue: Queue, runner: GroupRunner, engine: AsyncInference, options: CollectorOptions) -> None:
        self._queue, self._runner, self._engine, self._options = queue, runner, engine, options
        self._loader: Iterable[Any] | None = None
        self._source: Iterator[Any] = iter(())

    def next_items(self, loader: Iterable[Any]) -> Sequence[Item]:
        """Return the next items of a loader; another loader starts at its beginning."""
        if self._loader is not loader:
            self._loader, self._source = loader, _endless(loader)
        items = next(self._source)
        if not isinstance(items, Mapping):
            self._queue.ledger.begin(len(items), self._engine.get_version())
            return items
        if self._queue.ledger.batch_size is None:
            raise ConfigError("the loader yields single items: set consumer_batch_size, or let it yield lists of items")
        return [items]

    def next(
        self, count: int, timeout: float | None, is_short: Callable[[], bool], refill: Callable[[], None] | None = None
    ) -> list[Group]:
        """Return the oldest groups, consumed, as soon as the ledger allows it.

        `timeout`: in seconds; None sets no limit. `refill`: submits more; without it, too few groups are an error.
        """
        deadline = deadline_after(timeout)

        def is_hopeless() -> bool:
            return refill is None if is_short() else not (self._can_progress() or self._is_ready(count))

        while (groups := self._take(count)) is None:
            if not self._runner.wait_until(
                lambda: self._is_ready(count) or is_short() or not self._can_progress(),
                deadline,
                is_due=lambda: bool(self._held_up_by(count)),
            ):
                raise_late(self._queue.unfinished(), timeout)
            if refill is not None:
                refill()  # without the lock: it may iterate over the caller's loader
            with self._runner.changed:
                if is_hopeless():
                    raise self._too_few_error(count)
        return groups

    def _take(self, count: int) -> list[Group] | None:
        """Return the oldest groups, consumed, or None if they may not be consumed yet."""
        with self._runner.changed:
            self._runner.drop_too_old()
            for group in self._held_up_by(count):
                self._runner.drop(self._queue, group, held_up(self._options.stale_timeout))
            if not self._is_ready(count):
                return None
            groups = [self._queue.groups[id] for id in self._queue.ledger.oldest(count)]
            if self._runner.drop_misfits(self._queue, groups):
                return None
            self._runner.consume(self._queue, groups)
        return groups

    def _is_ready(self, count: int) -> bool:
        return self._queue.ledger.is_ready(count, self._engine.get_version())

    def _held_up_by(self, count: int) -> list[Group]:
        """Return the groups for which a batch has waited until their time-out."""
        limit = time.monotonic() - self._options.stale_timeout
        holding = [self._queue.groups[id] for id in self._queue.ledger.holding(count, self._engine.get_version())]
        return [group for group in holding if group.started is not None and group.started < limit]

    def _can_progress(self) -> bool:
        counters = self._queue.ledger.counters
        can_start = counters.waiting > 0 and self._queue.ledger.room(self._engine.get_version()) > 0
        return counters.running > 0 or self._runner.is_paused or can_start

    def _too_few_error(self, count: int) -> RolloutError:
        """Return an error that says why fewer than `count` groups remain."""
        queue = self._queue
        counters, lost = queue.ledger.counters, queue.ledger.lost
        found = f"{count} groups were asked for, {counters.ready} are ready"
        if len(queue.groups) < count:
            rest = ", and others" if len(lost) > NUM_NAMED else ""
            dropped = f"; dropped so far: {dict(lost.most_common(NUM_NAMED))}{rest}" if lost else ""
            return RolloutError(f"{found} and {counters.running + counters.waiting} under way{dropped}; submit more")
        return RolloutError(
            f"{found} and no more may start: at policy version {self._engine.get_version()} with "
            f"max_head_offpolicyness={self._options.max_head_offpolicyness} and batches of {queue.ledger.batch_size}, "
            f"{counters.accepted} groups are as many as may have been generated. Sync weights after each batch "
            "(the version counts the updates), or raise max_head_offpolicyness"
        )


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate over a loader again and again.

    Yields what the loader yields.
    """
    while True:
        is_empty = True
        for items in loader:
            is_empty = False
            yield items
        if is_empty:
            raise DataError("the loader has nothing (more) to yield; give one that can be iterated again")


def raise_late(late: Sequence[Group], timeout: float | None) -> NoReturn:
    """Raise an error that names the groups that had not ended in time."""
    now = time.monotonic()
    states = ["waiting" if group.started is None else f"running for {now - group.started:.1f} s" for group in late]
    shown = [f"group {group.id} ({state})" for group, state in zip(late[:NUM_NAMED], states, strict=False)]
    names = ", ".join([*shown, *(["..."] if len(late) > NUM_NAMED else [])])
    found = f"{len(late)} groups had not ended after {timeout:g} s: {names}"
    raise CallTimeout(found, tuple(f"group {group.id}" for group in late))
