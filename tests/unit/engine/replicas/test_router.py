"""Routing: the policy is a function of the loads, and the loads are counters."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlite.errors import ConfigError, RliteError, WorkerDied
from rlite.runtime.replicas.replica import InFlightRequest, InFlightTable
from rlite.runtime.replicas.router import Affinities, Router, least_outstanding
from rlite.types import GenerationHyperparameters, SequenceRequest, StopReason, TokenChunk


class IdleReplica:
    """Takes requests in and makes tokens when it is told to."""

    def __init__(self, index: int) -> None:
        self.workers = SimpleNamespace(index=index)
        self.table = InFlightTable()
        self.requests: list[InFlightRequest] = []

    @property
    def failure(self) -> Exception | None:
        return self.table.failure

    def check(self) -> None:
        pass

    def submit(self, requests: Sequence[InFlightRequest]) -> bool:
        self.requests += requests
        return self.table.add(requests)

    def make(self, request: InFlightRequest, num: int, reason: StopReason | None = None) -> None:
        values = [0.0] * num
        number = request.request.request_id
        chunk = TokenChunk(
            request_id=number,
            token_ids=[1] * num,
            logprobs=values,
            sampling_logprobs=values,
            version=0,
            finish_reason=reason,
        )
        self.table.take([chunk])


def in_flight(number: int, num_prompt: int = 10, max_new_tokens: int = 90) -> InFlightRequest:
    gconfig = GenerationHyperparameters(max_new_tokens=max_new_tokens)
    return InFlightRequest(SequenceRequest(request_id=number, input_ids=[number] * num_prompt, gconfig=gconfig, seed=0))


def router_of(num: int, **options: Any) -> tuple[Router, list[IdleReplica]]:
    router, replicas = Router("engine", **options), [IdleReplica(index) for index in range(num)]
    for replica in replicas:
        router.add(replica)  # type: ignore[arg-type]
    return router, replicas


def loads(router: Router) -> list[int]:
    return [counter.count for counter in router._outstanding.values()]


def test_a_request_goes_where_the_fewest_tokens_are_outstanding() -> None:
    router, replicas = router_of(2)
    requests = [in_flight(0, max_new_tokens=200), in_flight(1, max_new_tokens=20), in_flight(2, max_new_tokens=20)]
    for request in requests:
        router.route([[request]])
    assert [len(replica.requests) for replica in replicas] == [1, 2]
    assert loads(router) == [210, 60]
    replicas[0].make(requests[0], 180)
    assert loads(router) == [30, 60]
    router.route([[in_flight(3)]])
    assert len(replicas[0].requests) == 2


def test_the_counter_is_empty_when_all_have_ended_however_they_did() -> None:
    router, (replica, _) = router_of(2)
    requests = [in_flight(number) for number in range(4)]
    router.route([requests])
    replica.make(requests[0], 5, "stop")
    replica.make(requests[1], 90, "length")
    requests[2].fail(RliteError("dropped"))
    requests[3].abort()
    assert loads(router) == [0, 0]


def test_siblings_and_requests_of_one_key_share_a_replica() -> None:
    router, replicas = router_of(3)
    for number in range(4):
        router.route([[in_flight(number)]], affinity="group")
    router.route([[in_flight(10), in_flight(11)]])
    assert sorted(len(replica.requests) for replica in replicas) == [0, 2, 4]


def test_a_lost_replica_s_requests_and_sessions_move_to_the_others() -> None:
    router, (first, second) = router_of(2)
    moved = in_flight(0)
    router.route([[moved]], affinity="session")
    first.make(moved, 7)
    left = first.table.fail(WorkerDied("gone", ("rank 0",)))
    router.replica_failed(first, left, WorkerDied("gone", ("rank 0",)))  # type: ignore[arg-type]
    assert second.requests == [moved]
    assert moved.remaining_request().output_ids == [1] * 7
    assert loads(router) == [0, 93]
    router.route([[in_flight(1)]], affinity="session")
    assert len(second.requests) == 2
    assert [(lost.replica, lost.num_moved) for lost in router.lost] == [(0, 1)]
    second.table.fail(WorkerDied("gone too", ("rank 1",)))
    with pytest.raises(WorkerDied):
        router.route([[in_flight(2)]])


def test_a_policy_is_a_function_of_the_loads() -> None:
    seen = []

    def last(loads: Any, home: int | None) -> int:
        seen.append((dict(loads), home))
        return max(loads)

    router, replicas = router_of(2, policy=last)
    router.route([[in_flight(0)]], affinity="a")
    router.route([[in_flight(1)]], affinity="a")
    assert seen == [({0: 0, 1: 0}, None), ({0: 0, 1: 100}, 1)]
    assert len(replicas[1].requests) == 2
    assert least_outstanding({0: 5, 1: 3}, None) == 1
    assert least_outstanding({0: 5, 1: 3}, 0) == 0
    assert least_outstanding({1: 3}, 0) == 1


def test_keys_that_are_used_once_push_out_no_session() -> None:
    affinities = Affinities(max_sessions=2, max_first=3)
    for key in ("a", "a", "b", "b"):
        affinities.set(key, 1)
    for number in range(100):
        affinities.set(f"once {number}", 0)
    assert [affinities.get(key) for key in ("a", "b", "once 99", "once 96")] == [1, 1, 0, None]
    for key in ("a", "c", "c"):
        affinities.set(key, 2)
    assert [affinities.get(key) for key in ("a", "b", "c")] == [2, None, 2]


def test_a_policy_of_the_users_own_chooses_among_the_replicas_that_serve() -> None:
    router, replicas = router_of(3, policy=lambda loads, home: max(loads))
    router.route([[in_flight(0)], [in_flight(1)]])
    assert [len(replica.requests) for replica in replicas] == [0, 0, 2]
    replicas[2].table.fail(WorkerDied("gone", ("rank 2",)))
    router.route([[in_flight(2)]])
    assert len(replicas[1].requests) == 1


def test_a_policy_that_names_no_serving_replica_is_an_error() -> None:
    router, _ = router_of(2, policy=lambda loads, home: 2)
    with pytest.raises(ConfigError, match=r"routing returned 2; expected one of the replicas \[0, 1\]"):
        router.route([[in_flight(0)]])


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_that_has_ended_lets_go_of_its_caller(fails: bool) -> None:
    request, chunks = in_flight(7), []
    request.on_chunk = chunks.append
    chunk = TokenChunk(request_id=7, token_ids=[1], logprobs=[0.0], sampling_logprobs=[0.0], version=0)
    assert not request.take(chunk)
    if fails:
        request.fail(RliteError("lost"))
    else:
        request.abort()
    assert len(chunks) == (1 if fails else 2)
    assert request.done.done()
    assert request.on_chunk is None
