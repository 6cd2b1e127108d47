"""Replicas join and leave an engine that serves: on command, by a policy, and after SIGTERM."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.errors import ConfigError, PlacementError
from rlite.runtime.replicas.replica_set import TargetInFlight
from rlite.types import LLMRequest
from tests.integration.modules import LlamaPolicy, make_batch, num_counted, on_meta, token_loss
from tests.integration.test_lost_replicas import answers, requests
from tests.integration.test_replaced_replicas import check_same, silent
from tests.integration.worlds import process_of, ray_session

pytestmark = pytest.mark.slow
NUM = 32
SOON_S = 240.0


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(4):
        yield


def long_requests(num: int, **gconfig: Any) -> list[LLMRequest]:
    """They take so long that a replica has time to leave."""
    asked = requests(**gconfig)[:num]
    return [replace(request, gconfig=request.gconfig.new(max_new_tokens=160)) for request in asked]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.nightly
def test_replicas_join_with_the_current_weights_and_leave_without_a_lost_token(models: dict[str, Path]) -> None:
    serve = RliteInferenceEngine(models["llama"])
    serve.build(data_parallel_size=1, max_model_len=512, max_num_seqs=12, deterministic=True)
    train = RliteTrainEngine(on_meta(LlamaPolicy, models["llama"]))
    train.build(tensor_parallel_size=1, data_parallel_size=1, not_colocate_with=serve)
    train.scale_weights(1.5)
    train.p2p_weight_sync(serve)
    asked = long_requests(NUM, seed=3, temperature=0.8)
    expected = answers(serve, asked, silent)

    with pytest.raises(PlacementError, match="3 executors"):
        serve.scale(4)
    with pytest.raises(ConfigError, match="at least 1"):
        serve.scale(0)
    assert serve.num_replicas == 1

    joining = threading.Thread(target=serve.scale, args=(3,))
    joining.start()
    while joining.is_alive():
        assert len(serve.generate([[1, 2]] * 4, {"max_tokens": 4})) == 4, "the first one serves all the time"
    joining.join()
    assert serve.num_replicas == 3
    check_same(asked, answers(serve, asked, silent), expected, version=1)

    seen = itertools.count()
    leaving: list[threading.Thread] = []

    def scale_down() -> None:
        if next(seen) == 2 * NUM:
            leaving.append(threading.Thread(target=serve.scale, args=(1,)))
            leaving[0].start()

    # new sessions, which go to all replicas
    made = answers(serve, long_requests(NUM, seed=3, temperature=0.8), scale_down)
    check_same(asked, made, expected, version=1)
    leaving[0].join()
    assert serve.num_replicas == 1
    assert [left.replica for left in serve.left_replicas] == [1, 2]
    assert sum(left.num_moved for left in serve.left_replicas) > 0
    assert serve.lost_replicas == []

    # the devices are free again, the slots are used again, and weights reach whoever serves
    serve.scale(2)
    train.scale_weights(0.5)
    train.p2p_weight_sync(serve, verify_checksums=True)
    assert serve.get_version() == 2
    first = process_of(serve, 0)
    expected = answers(serve, asked[:8], silent)
    os.kill(first, signal.SIGTERM)
    until(lambda: serve.num_replicas == 1)
    check_same(asked[:8], answers(serve, asked[:8], silent), expected, version=2)
    train.release()
    serve.release()


@pytest.mark.nightly
def test_replicas_that_join_serve_the_adapters_of_the_engine(models: dict[str, Path]) -> None:
    serve = RliteInferenceEngine(models["llama"])
    serve.build(data_parallel_size=1, max_model_len=512, max_num_seqs=4, deterministic=True)
    train = RliteTrainEngine(on_meta(LlamaPolicy, models["llama"]))
    train.build(tensor_parallel_size=1, data_parallel_size=1, not_colocate_with=serve)
    train.add_adapter("a", {"rank": 4})
    for _ in range(2):
        train.train_batch(make_batch([9, 5]), token_loss, num_counted, adapter="a")
        train.optimizer_step("a", lr=2e-2)
        train.p2p_adapter_sync(serve, "a", may_be_zero=True)
    asked = [replace(request, adapter="a") for request in long_requests(8, seed=3, temperature=0.8)]
    expected = answers(serve, asked, silent)
    assert serve.adapters == {"a": 2}
    serve.scale(2)
    check_same(asked, answers(serve, asked, silent), expected, version=2)
    first = process_of(serve, 0)
    os.kill(first, signal.SIGKILL)  # the one that joined is left, and then joined by another
    until(lambda: len(serve.replaced_replicas) == 1)
    check_same(asked, answers(serve, asked, silent), expected, version=2)
    train.release()
    serve.release()


@pytest.mark.nightly
def test_sigterm_lets_a_replica_leave_while_it_generates(models: dict[str, Path]) -> None:
    serve = RliteInferenceEngine(models["llama"])
    serve.build(data_parallel_size=2, tensor_parallel_size=2, max_model_len=512, max_num_seqs=12, deterministic=True)
    asked = long_requests(16, greedy=True)
    expected = answers(serve, asked, silent)
    pid, seen = process_of(serve, 3), itertools.count()
    made = answers(serve, asked, lambda: os.kill(pid, signal.SIGTERM) if next(seen) == 16 else None)
    check_same(asked, made, expected, version=0)
    until(lambda: len(serve.left_replicas) == 1)
    (left,) = serve.left_replicas
    assert (left.replica, left.reason) == (1, "SIGTERM")
    assert left.num_moved > 0
    assert serve.lost_replicas == [], "it left before it ended"
    until(lambda: all(serve.group.handles[rank].death.done() for rank in (2, 3)))

    # the last replica has nobody to hand its requests to
    os.kill(process_of(serve, 0), signal.SIGTERM)
    check_same(asked, answers(serve, asked, silent), expected, version=0)
    assert serve.num_replicas == 1
    serve.release()


@pytest.mark.nightly
def test_a_policy_scales_with_the_load(models: dict[str, Path]) -> None:
    serve = RliteInferenceEngine(models["llama"])
    serve.build(data_parallel_size=1, max_model_len=512, max_num_seqs=4, deterministic=True)
    asked = requests(greedy=True)
    expected = [response.output_tokens for response in answers(serve, asked, silent)]
    made, is_busy = [], threading.Event()
    is_busy.set()

    def rollouts() -> None:
        while is_busy.is_set():
            made.append([response.output_tokens for response in answers(serve, asked, silent)])

    busy = threading.Thread(target=rollouts)
    serve.follow(TargetInFlight(per_replica=8, max_replicas=2), every_s=0.05, shrink_after_s=5.0)
    busy.start()
    try:
        until(lambda: serve.num_replicas == 2)  # 32 requests at 8 for each replica
    finally:
        is_busy.clear()
        busy.join()
    assert made
    assert all(tokens == expected for tokens in made)
    until(lambda: serve.num_replicas == 1)
    serve.follow(None)
    serve.release()
