"""Worker groups over threads: real hosts and workers, each with a queue of its own, without processes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from rlite.errors import CallTimeout, WorkerDied, WorkerError
from rlite.runtime.cluster import group as group_module
from rlite.runtime.cluster.group import WorkerGroup, apply_on_processes
from rlite.runtime.cluster.host import CallPosition, Outcome, WorkerContext, WorkerHost, WorkerKey
from rlite.runtime.cluster.placement import Device


class ThreadHandle:
    """A worker whose "process" is a thread; `die` makes it answer no more."""

    def __init__(self, number: int) -> None:
        self.process = number
        self.death: Future[Any] = Future()
        self.stopped: list[WorkerKey] = []
        self._host = WorkerHost()
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._open: list[Future] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def submit(self, method: Callable[..., Outcome], *args: Any) -> Future[Outcome]:
        answer: Future[Outcome] = Future()
        self._open.append(answer)
        self._calls.put((lambda: method(self._host, *args), answer))
        return answer

    def look(self) -> Future[CallPosition]:
        answer: Future[CallPosition] = Future()
        answer.set_result(self._host.look())
        return answer

    def stop(self, key: WorkerKey) -> None:
        self.stopped.append(key)

    def die(self) -> None:
        self.death.set_exception(WorkerDied("gone"))
        for answer in self._open:
            if not answer.done():
                answer.set_exception(WorkerDied("gone"))

    def _serve(self) -> None:
        while True:
            act, answer = self._calls.get()
            outcome = act()
            if not answer.done():
                answer.set_result(outcome)


def contexts_of(group: WorkerGroup, ranks: Sequence[int]) -> list[WorkerContext]:
    everyone = tuple(range(len(group)))
    return [WorkerContext(rank, len(group), group.devices[rank], "cpu", 1, everyone) for rank in ranks]


class Stubborn(Exception):
    """Does not survive pickling."""

    def __init__(self, lock: Any) -> None:
        super().__init__("locked")
        self.lock = lock


class Counter:
    def __init__(self, context: WorkerContext) -> None:
        self.rank = context.rank
        self.log: list[int] = []

    def add(self, number: int) -> tuple[int, int]:
        self.log.append(number)
        return self.rank, number

    def sleep(self, seconds: list[float]) -> int:
        time.sleep(seconds[self.rank])
        return self.rank

    def stumble(self, broken: int, others_sleep: float) -> None:
        if self.rank == broken:
            raise KeyError("lost")
        time.sleep(others_sleep)

    def stumble_first(self, broken: int, may_end: threading.Event) -> None:
        if self.rank == broken:
            raise KeyError("lost")
        assert may_end.wait(100)

    def lock_up(self) -> None:
        raise Stubborn(threading.Lock())

    def history(self) -> list[int]:
        return self.log


def make_group(name: str = "train-0", size: int = 3) -> WorkerGroup:
    devices = [Device("node", i, "10.0.0.1") for i in range(size)]
    group = WorkerGroup(name, devices, [ThreadHandle(i) for i in range(size)], call_timeout=20.0)
    group.create(Counter, contexts_of(group, range(size)), timeout=20.0)
    return group


def broadcast(group: WorkerGroup, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
    return group.call(method, [(args, {})] * len(group), timeout=timeout)


@pytest.fixture
def group() -> WorkerGroup:
    return make_group()


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "PEER_GRACE_S", 0.2)


def test_results_come_in_rank_order(group: WorkerGroup) -> None:
    assert broadcast(group, "sleep", [0.1, 0.05, 0.0]) == [0, 1, 2]
    assert group.call("add", [((5,), {}), ((), {"number": 7})], ranks=[2, 0]) == [(2, 5), (0, 7)]


def test_calls_run_in_their_order(group: WorkerGroup) -> None:
    for number in range(5):
        broadcast(group, "add", number)
    assert broadcast(group, "history") == [list(range(5))] * 3


def test_late_workers_are_named_and_the_group_goes_on(group: WorkerGroup) -> None:
    with pytest.raises(CallTimeout, match=r"sleep: no answer within 0\.1 s from 2 of 3 workers") as caught:
        broadcast(group, "sleep", [0.0, 0.4, 0.4], timeout=0.1)
    assert caught.value.late == ("train-0 rank 1 on 10.0.0.1/cpu:1", "train-0 rank 2 on 10.0.0.1/cpu:2")
    assert broadcast(group, "add", 1) == [(0, 1), (1, 1), (2, 1)]


def test_an_exception_keeps_its_type_and_says_where_it_was_raised(group: WorkerGroup) -> None:
    with pytest.raises(KeyError, match="lost") as caught:
        broadcast(group, "stumble", 1, 0.0)
    assert "raised in worker train-0 rank 1 on 10.0.0.1/cpu:1" in str(caught.value.__cause__)
    assert "in stumble" in str(caught.value.__cause__)
    assert group.failure is None


def test_an_exception_that_cannot_travel_is_told(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match="Stubborn: locked"):
        broadcast(group, "lock_up")


def test_peers_that_do_not_end_after_an_exception_stop_the_group(group: WorkerGroup) -> None:
    with pytest.raises(KeyError, match="lost"):
        broadcast(group, "stumble", 0, 3.0)
    assert [handle.stopped for handle in group.handles] == [[("train-0", rank)] for rank in range(3)]
    with pytest.raises(WorkerError, match=r"rank 1 .* rank 2 .* waited for it in a collective"):
        broadcast(group, "add", 1)


def test_a_death_is_the_cause_even_where_a_peer_complains_first(group: WorkerGroup) -> None:
    threading.Timer(0.1, group.handles[2].die).start()
    with pytest.raises(WorkerDied, match="rank 2") as caught:
        broadcast(group, "stumble", 0, 1.0)
    assert caught.value.workers == ("train-0 rank 2 on 10.0.0.1/cpu:2",)
    with pytest.raises(WorkerDied, match="Build the engine again"):
        broadcast(group, "add", 1)


def test_a_stopped_group_says_so(group: WorkerGroup) -> None:
    group.stop()
    group.stop()
    with pytest.raises(WorkerError, match="was released"):
        broadcast(group, "add", 1)
    assert group.handles[0].stopped == [("train-0", 0)]


def names(*workers: Counter | None) -> list[int | None]:
    return [None if worker is None else worker.rank for worker in workers]


def wait_long(worker: Counter, seconds: float) -> None:
    time.sleep(seconds)


def test_a_function_reaches_workers_of_two_groups_in_one_call() -> None:
    first, second = make_group("train-0", 2), make_group("inference-0", 2)
    calls = [(first, 1, (first.key(1), None), ()), (second, 0, (second.key(0),), ())]
    assert apply_on_processes(calls, names, [first, second], "ask", 10.0) == [[1, None], [0]]


def test_a_death_in_one_group_stops_the_other_only_if_it_hangs() -> None:
    for seconds, is_stuck in ((0.15, False), (3.0, True)):
        first, second = make_group("train-0", 2), make_group("inference-0", 1)
        calls = [(first, 0, (first.key(0),), (3.0,)), (second, 0, (second.key(0),), (seconds,))]
        threading.Timer(0.05, first.handles[0].die).start()
        with pytest.raises(WorkerDied, match="train-0 rank 0"):
            apply_on_processes(calls, wait_long, [first, second], "weight sync", 10.0)
        assert isinstance(first.failure, WorkerDied)
        assert (second.failure is not None) == is_stuck


def test_a_death_stops_its_replica_alone_and_calls_to_all_name_it() -> None:
    group = make_group("inference-0", 4)
    group.replica_size = 2
    threading.Timer(0.05, group.handles[1].die).start()
    with pytest.raises(WorkerDied, match="Replica 0 of inference-0 was stopped, the others go on") as caught:
        group.call("sleep", [(([1.0] * 4,), {})] * 2, ranks=[0, 1])
    assert caught.value.workers == ("inference-0 rank 1 on 10.0.0.1/cpu:1",)
    assert [bool(handle.stopped) for handle in group.handles] == [True, True, False, False]
    assert group.call("add", [((5,), {})] * 2, ranks=[2, 3]) == [(2, 5), (3, 5)]
    group.check()
    for rank in (0, 1):
        with pytest.raises(WorkerDied, match="rank 1"):
            group.call("add", [((1,), {})], ranks=[rank])
    with pytest.raises(WorkerDied, match="rank 1"):
        broadcast(group, "add", 7)
    assert group.call("history", [((), {})], ranks=[2]) == [[5]], "a call to all begins nowhere"


def test_with_its_last_replica_the_group_has_failed_and_names_all_who_died() -> None:
    group = make_group("inference-0", 2)
    group.replica_size = 1
    for rank in (1, 0):
        group.handles[rank].die()
        with pytest.raises(WorkerDied, match=f"rank {rank}"):
            group.call("add", [((5,), {})], ranks=[rank])
    assert isinstance(group.failure, WorkerDied)
    assert set(group.failure.workers) == {group.describe(0), group.describe(1)}
    with pytest.raises(WorkerDied, match="Build the engine again"):
        group.check()


def test_a_replica_does_not_wait_for_another_that_raises() -> None:
    group = make_group("inference-0", 2)
    group.replica_size = 1
    may_end = threading.Event()
    with pytest.raises(KeyError, match="lost"):
        broadcast(group, "stumble_first", 0, may_end)
    may_end.set()
    assert group.losses == {}, "the other one is in no collective with it"
    assert broadcast(group, "add", 1) == [(0, 1), (1, 1)]


def test_waiting_for_one_replica_after_another_has_returned_unevenly_costs_no_cpu_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_module, "UNEVEN_S", 0.05)
    group = make_group("inference-0", 4)
    group.replica_size = 2
    started = time.thread_time()
    assert broadcast(group, "sleep", [0.0, 0.2, 1.0, 1.0]) == [0, 1, 2, 3]
    assert time.thread_time() - started < 0.2


def started_again(group: WorkerGroup, first: int, size: int) -> None:
    """Serve new workers in these ranks, as a launcher does."""
    devices = [Device("node", rank, "10.0.0.1") for rank in range(first, first + size)]
    handles = [ThreadHandle(100 + rank) for rank in range(first, first + size)]
    candidate = group.with_replica(first, devices, handles)
    candidate.create(Counter, contexts_of(candidate, range(first, first + size)), timeout=20.0)
    group.take_replica(first, devices, handles)


def test_a_replica_that_is_started_again_serves_beside_the_others() -> None:
    group = make_group("inference-0", 4)
    group.replica_size = 2
    old = group.handles[1]
    group.mark_lost([1], WorkerDied("gone", ("rank 1",)))
    with pytest.raises(WorkerDied):
        broadcast(group, "add", 1)
    started_again(group, 0, 2)
    assert broadcast(group, "add", 1) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    old.die()
    assert broadcast(group, "add", 2) == [(0, 2), (1, 2), (2, 2), (3, 2)], "the late news is of another process"


def test_a_group_that_has_failed_comes_back_with_its_replica_and_a_released_one_does_not() -> None:
    group = make_group()
    group.mark_lost([2], WorkerDied("gone", ("rank 2",)))
    assert isinstance(group.failure, WorkerDied)
    started_again(group, 0, 3)
    assert broadcast(group, "add", 1) == [(0, 1), (1, 1), (2, 1)]
    group.stop()
    with pytest.raises(WorkerError, match="released"):
        started_again(group, 0, 3)


def test_an_offered_replica_serves_only_after_its_start() -> None:
    group = make_group("inference-0", 2)
    group.replica_size = 1
    group.offer(2, [Device("node", 2, "10.0.0.1")])
    assert len(group) == 3
    assert [group.is_serving(rank) for rank in range(3)] == [True, True, False]
    with pytest.raises(WorkerError, match="has not started"):
        group.call("add", [((1,), {})], ranks=[2])
    started_again(group, 2, 1)
    assert broadcast(group, "add", 1) == [(0, 1), (1, 1), (2, 1)]
