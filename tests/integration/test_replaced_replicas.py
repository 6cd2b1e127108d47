"""A killed replica is replaced: the others take over its requests and go on, and it comes back with current weights."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.engine.weights import Sync
from rlite.errors import WorkerDied
from rlite.runtime.cluster.session import current_session
from rlite.runtime.replicas.transport import Layout
from rlite.types import LLMRequest, LLMResponse
from tests.integration.modules import LlamaPolicy, on_meta
from tests.integration.test_lost_replicas import BUILD, answers, requests
from tests.integration.worlds import kill, process_of, ray_session

pytestmark = pytest.mark.slow
NUM = 32
SOON_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(4):
        yield


@pytest.fixture
def serve(models: dict[str, Path]) -> Iterator[RliteInferenceEngine]:
    engine = RliteInferenceEngine(models["llama"])
    engine.build(**BUILD)
    yield engine
    engine.release()


@pytest.fixture
def train(models: dict[str, Path], serve: RliteInferenceEngine) -> Iterator[RliteTrainEngine]:
    """A policy that is not the checkpoint's."""
    engine = RliteTrainEngine(on_meta(LlamaPolicy, models["llama"]))
    engine.build(tensor_parallel_size=2, colocate_with=serve)
    engine.scale_weights(1.5)
    yield engine
    engine.release()


def silent() -> None:
    pass


def check_same(asked: list[LLMRequest], made: list[LLMResponse], expected: list[LLMResponse], version: int) -> None:
    for request, response, whole in zip(asked, made, expected, strict=True):
        assert response.output_len == request.gconfig.max_new_tokens
        assert response.output_tokens == whole.output_tokens
        assert response.output_logprobs == whole.output_logprobs
        assert response.output_versions == [version] * response.output_len


def test_replaced_replica_has_the_synced_weights(serve: RliteInferenceEngine, train: RliteTrainEngine) -> None:
    asked = requests(seed=3, temperature=0.8)
    unsynced = answers(serve, asked, silent)
    train.p2p_weight_sync(serve)
    expected = answers(serve, asked, silent)
    assert [response.output_tokens for response in expected] != [response.output_tokens for response in unsynced]
    pid, seen = process_of(serve, 1), itertools.count()
    made = answers(serve, asked, lambda: kill(pid) if next(seen) == 3 * NUM else None)
    check_same(asked, made, expected, version=1)
    (lost,) = serve.lost_replicas
    assert lost.replica == 1
    assert 0 < lost.num_moved < NUM
    while not serve.replaced_replicas:
        assert len(serve.generate([[1, 2]] * 4, {"max_tokens": 4})) == 4, "the other serves all the time"
    (replaced,) = serve.replaced_replicas
    assert (replaced.replica, replaced.version) == (1, 1)
    assert 0 < replaced.seconds < SOON_S
    assert process_of(serve, 1) != pid
    assert serve.group.losses == {}

    # the next answers come from the new replica alone
    other, seen = process_of(serve, 0), itertools.count()
    made = answers(serve, asked, lambda: kill(other) if next(seen) == 0 else None)
    check_same(asked, made, expected, version=1)
    serve.wait_for_replacements()
    assert [lost.replica for lost in serve.lost_replicas] == [1, 0]
    assert [replaced.replica for replaced in serve.replaced_replicas] == [1, 0]
    check_same(asked, answers(serve, asked, silent), expected, version=1)


@pytest.mark.nightly
def test_an_idle_replica_s_death_is_noticed_and_calls_on_all_replicas_go_on(
    serve: RliteInferenceEngine, train: RliteTrainEngine
) -> None:
    asked = requests(greedy=True)[:8]
    kill(process_of(serve, 0))
    report = train.p2p_weight_sync(serve)
    assert report.version == 1
    train.scale_weights(0.5)
    assert train.p2p_weight_sync(serve).version == 2, "the replica that starts is not waited for"
    expected = answers(serve, asked, silent)
    serve.wait_for_replacements()
    assert [replaced.replica for replaced in serve.replaced_replicas] == [0]
    assert serve.replaced_replicas[0].version == 2
    kill(process_of(serve, 1))
    check_same(asked, answers(serve, asked, silent), expected, version=2)
    serve.wait_for_replacements()
    serve.pause()
    kill(process_of(serve, 0))
    wait_until_lost(serve, 3)
    serve.wait_for_replacements()
    serve.resume()
    train.scale_weights(2.0)
    train.p2p_weight_sync(serve, verify_checksums=True)
    assert len(serve.memory_bytes()) == 2
    assert {response.output_versions[0] for response in answers(serve, asked, silent)} == {3}


def test_a_replica_that_is_lost_once_its_weights_are_described_is_left_out(
    serve: RliteInferenceEngine, train: RliteTrainEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = Sync._describe

    def describe_and_lose(sync: Sync, may_share: bool) -> list[Layout]:
        layouts = describe(sync, may_share)
        if not serve.lost_replicas:
            kill(process_of(serve, 1))
            wait_until_lost(serve, 1)
        return layouts

    monkeypatch.setattr(Sync, "_describe", describe_and_lose)
    assert train.p2p_weight_sync(serve, verify_checksums=True).version == 1
    serve.wait_for_replacements()
    assert serve.replaced_replicas[0].version == 1


def wait_until_lost(engine: RliteInferenceEngine, num: int) -> None:
    deadline = time.monotonic() + SOON_S
    while len(engine.lost_replicas) < num:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.nightly
def test_replaced_replica_has_the_residency_of_the_engine(serve: RliteInferenceEngine, train: RliteTrainEngine) -> None:
    train.p2p_weight_sync(serve)
    expected = answers(serve, asked := requests(greedy=True)[:8], silent)
    serve.meta()
    kill(process_of(serve, 0))
    wait_until_lost(serve, 1)
    serve.cuda("weights")
    train.p2p_weight_sync(serve)
    serve.cuda("kv_cache")
    serve.wait_for_replacements()
    assert [replaced.replica for replaced in serve.replaced_replicas] == [0]
    check_same(asked, answers(serve, asked, silent), expected, version=2)
    kill(process_of(serve, 1))
    check_same(asked, answers(serve, asked, silent), expected, version=2)


@pytest.mark.nightly
def test_a_replica_of_two_workers_comes_back_whole(models: dict[str, Path]) -> None:
    engine = RliteInferenceEngine(models["llama"])
    engine.build(**BUILD, tensor_parallel_size=2)
    asked = requests(greedy=True)[:8]
    expected = answers(engine, asked, silent)
    pid, seen = process_of(engine, 3), itertools.count()
    check_same(asked, answers(engine, asked, lambda: kill(pid) if next(seen) == 8 else None), expected, version=0)
    engine.load()  # version 1: from here on, weights come from the other replica
    engine.wait_for_replacements()
    assert [replaced.replica for replaced in engine.replaced_replicas] == [1]
    kill(process_of(engine, 0))
    check_same(asked, answers(engine, asked, silent), expected, version=1)
    engine.wait_for_replacements()
    kill(process_of(engine, 2))
    check_same(asked, answers(engine, asked, silent), expected, version=1)
    engine.release()


def test_a_budget_bounds_the_replacements(models: dict[str, Path]) -> None:
    engine = RliteInferenceEngine(models["llama"], max_replacements=1)
    engine.build(**BUILD)
    kill(process_of(engine, 1))
    wait_until_lost(engine, 1)
    engine.wait_for_replacements()
    assert len(engine.memory_bytes()) == 2
    kill(process_of(engine, 1))
    assert len(engine.generate([[i] for i in range(8)], {"max_tokens": 4})) == 8
    with pytest.raises(WorkerDied, match="rank 1"):
        engine.memory_bytes()
    assert len(engine.replaced_replicas) == 1
    engine.release()


def test_a_replacement_under_way_at_the_end_of_the_session_starts_no_other_ray(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RliteInferenceEngine(models["llama"])
    engine.build(**BUILD)
    launcher = current_session().launcher
    began, goes_on = threading.Event(), threading.Event()
    locate = launcher._located  # type: ignore[attr-defined]

    def late(*args: object) -> object:
        began.set()
        assert goes_on.wait(SOON_S)
        return locate(*args)

    monkeypatch.setattr(launcher, "_located", late)
    kill(process_of(engine, 1))
    assert began.wait(SOON_S)
    rlite.shutdown()
    goes_on.set()
    engine.wait_for_replacements()
    assert not ray.is_initialized()
