"""One of two replicas is killed: its requests continue on the other, and their callers are not affected.

Here a lost replica stays lost; `test_replaced_replicas.py` tests its replacement.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.errors import ResidencyError, WorkerDied
from rlite.rollout import RewardFunction, SingleTurnWorkflow
from rlite.runtime.replicas.router import ReplicaLost
from rlite.types import GenerationHyperparameters, LLMRequest, LLMResponse
from tests.integration.modules import LlamaPolicy, on_meta
from tests.integration.worlds import kill, process_of, ray_session

pytestmark = pytest.mark.slow
SOON_S = 40.0
NUM = 32
# fewer slots in each replica than there are requests; an answer that moves has the bits of one that stays
BUILD: dict[str, Any] = {"data_parallel_size": 2, "max_model_len": 512, "max_num_seqs": 12, "deterministic": True}


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(4):
        yield


@pytest.fixture(scope="module")
def engine(models: dict[str, Path]) -> RliteInferenceEngine:
    return RliteInferenceEngine(models["llama"], max_replacements=0)


@pytest.fixture
def serve(engine: RliteInferenceEngine) -> RliteInferenceEngine:
    """Two replicas that live."""
    if engine.is_built and engine.group.losses:
        engine.release()
    if not engine.is_built:
        engine.build(**BUILD)
    return engine


def requests(**gconfig: Any) -> list[LLMRequest]:
    """Ragged in their prompts and in what they ask for."""
    return [
        LLMRequest(
            input_ids=[(7 * i + k) % 256 for k in range(1 + i % 13)],
            gconfig=GenerationHyperparameters(max_new_tokens=24 + 6 * i, ignore_eos=True, **gconfig),
        )
        for i in range(NUM)
    ]


def answers(engine: RliteInferenceEngine, asked: list[LLMRequest], on_chunk: Callable[[], None]) -> list[LLMResponse]:
    """All at once, each with the tokens that its stream showed."""

    async def one(request: LLMRequest) -> LLMResponse:
        shown: list[int] = []

        def take(chunk: Any) -> None:
            on_chunk()
            shown.extend(chunk.token_ids)

        response = await engine.agenerate(request, take)
        assert shown == response.output_tokens, "a token was shown twice, or never"
        return response

    async def all_of_them() -> list[LLMResponse]:
        return await asyncio.gather(*(one(request) for request in asked))

    return asyncio.run(all_of_them())


def test_all_answers_are_whole_and_as_without_the_kill(
    serve: RliteInferenceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    for sampling in ({"greedy": True}, {"seed": 3, "temperature": 0.8}):
        if serve.lost_replicas:
            serve.release()
            serve.build(**BUILD)
        asked = requests(**sampling)
        expected = answers(serve, asked, lambda: None)
        pid, name, seen = process_of(serve, 1), serve.group.describe(1), itertools.count()
        with caplog.at_level(logging.WARNING):
            made = answers(serve, asked, lambda: kill(pid) if next(seen) == 3 * NUM else None)  # noqa: B023
        for request, response, whole in zip(asked, made, expected, strict=True):
            assert response.stop_reason == "length"
            assert response.output_len == request.gconfig.max_new_tokens
            assert response.output_tokens == whole.output_tokens
            assert response.output_logprobs == whole.output_logprobs
            assert response.output_versions == [0] * response.output_len
        (lost,) = serve.lost_replicas
        assert (lost.replica, lost.workers) == (1, (name,))
        assert 0 < lost.num_moved < NUM
        assert name in caplog.text
        assert f"{lost.num_moved} requests in flight continue" in caplog.text
        serve.pause()  # at a token boundary
        assert serve.num_in_flight == 0
        serve.resume()


@pytest.mark.nightly
def test_remaining_replicas_serve_requests(serve: RliteInferenceEngine) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 150, "ignore_eos": True}
    prompts = [request.input_ids for request in requests()]
    expected = [output.outputs[0].token_ids for output in serve.generate(prompts, sampling)]
    pid = process_of(serve, 0)

    def kill_in_the_middle() -> None:
        while serve.num_in_flight > NUM - 4 or not serve.num_in_flight:
            time.sleep(0.002)
        kill(pid)

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    made = [output.outputs[0].token_ids for output in serve.generate(prompts, sampling)]
    killer.join()
    assert made == expected
    assert [lost.replica for lost in serve.lost_replicas] == [0]
    assert serve.lost_replicas[0].num_moved > 0
    assert [output.outputs[0].token_ids for output in serve.generate(prompts, sampling)] == expected
    assert len(serve.lost_replicas) == 1, "the dead one is not asked again"


def share_of_even(completion_ids: list[int], **_: Any) -> float:
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)


@pytest.mark.nightly
def test_a_rollout_batch_is_whole_and_each_row_is_there_once(serve: RliteInferenceEngine) -> None:
    gconfig = GenerationHyperparameters(max_new_tokens=150, ignore_eos=True, greedy=True)
    tokenizer = AutoTokenizer.from_pretrained(serve.path)
    workflow = SingleTurnWorkflow(RewardFunction(share_of_even, in_process=True), gconfig, tokenizer)
    items = [{"input_ids": request.input_ids} for request in requests()]
    expected = serve.rollout_batch(items, workflow)
    pid = process_of(serve, 1)
    attempts = serve.collector.failed_attempts.total()

    def kill_in_the_middle() -> None:
        while serve.num_in_flight > NUM - 4 or not serve.num_in_flight:
            time.sleep(0.002)
        kill(pid)

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    batch = serve.rollout_batch(items, workflow)
    killer.join()
    assert serve.lost_replicas[0].num_moved > 0
    for key in ("input_ids", "attention_mask", "loss_mask", "versions", "rewards", "logprobs"):
        assert torch.equal(batch[key], expected[key]), key
    assert len(set(batch["group_ids"].tolist())) == NUM
    assert serve.collector.failed_attempts.total() == attempts, "no episode was begun again"
    assert serve.collector.lost.total() == 0


def test_calls_on_all_replicas_name_missing_ones(serve: RliteInferenceEngine, models: dict[str, Path]) -> None:
    train = RliteTrainEngine(on_meta(LlamaPolicy, models["llama"]))
    train.build(tensor_parallel_size=2, colocate_with=serve)
    name, pid = serve.group.describe(1), process_of(serve, 1)
    kill(pid)
    greedy = {"temperature": 0.0, "max_tokens": 8}
    assert len(serve.generate([[i] for i in range(8)], greedy)) == 8, "nobody had noticed until now"
    for needs_all in (serve.cpu, lambda: serve.cuda("weights"), lambda: serve.set_version(5), serve.memory_bytes):
        with pytest.raises(WorkerDied, match="rank 1") as caught:
            needs_all()
        assert caught.value.workers == (name,)
        assert len(serve.generate([[1]], greedy)) == 1
    assert serve.get_version() == 0

    started = time.monotonic()
    with pytest.raises(WorkerDied, match="rank 1"):
        train.p2p_weight_sync(serve)
    assert time.monotonic() - started < SOON_S
    with pytest.raises(ResidencyError, match="not written yet"):
        serve.generate([[1]], greedy)
    assert train.is_tied() is False, "the source goes on"

    serve.release()
    serve.build(**BUILD, colocate_with=train)
    train.p2p_weight_sync(serve)
    assert len(serve.generate([[1]] * 4, greedy)) == 4
    train.release()
    serve.release()


def test_with_the_last_replica_everything_ends_with_its_name(serve: RliteInferenceEngine) -> None:
    names = {serve.group.describe(rank) for rank in range(2)}
    pids, seen = [process_of(serve, rank) for rank in range(2)], itertools.count()

    def kill_both() -> None:
        if next(seen) == NUM:
            for pid in pids:
                kill(pid)

    started = time.monotonic()
    with pytest.raises(WorkerDied, match="inference-"):
        answers(serve, requests(greedy=True), kill_both)
    assert time.monotonic() - started < SOON_S
    with pytest.raises(WorkerDied) as caught:
        serve.generate([[1]], {"max_tokens": 1})
    assert set(caught.value.workers) == names
    assert [type(lost) for lost in serve.lost_replicas] == [ReplicaLost]
    serve.release()


@pytest.mark.nightly
def test_a_worker_takes_its_replica_with_it_and_no_other(engine: RliteInferenceEngine) -> None:
    engine.release()
    engine.build(**BUILD, tensor_parallel_size=2)
    asked = requests(greedy=True)[:12]
    expected = answers(engine, asked, lambda: None)
    pid, seen = process_of(engine, 3), itertools.count()  # its peer sits in a collective with it
    made = answers(engine, asked, lambda: kill(pid) if next(seen) == 20 else None)
    assert [response.output_tokens for response in made] == [response.output_tokens for response in expected]
    (lost,) = engine.lost_replicas
    assert (lost.replica, lost.workers) == (1, (engine.group.describe(3),))
    assert 0 < lost.num_moved < 12
    assert engine.group.handles[2].death.done(), "half a replica is not left over"
    assert len(engine.generate([[1]] * 4, {"max_tokens": 4})) == 4
    engine.release()
