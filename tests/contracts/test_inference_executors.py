"""Contract of inference executors, for each registered name, including a third-party executor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine, register_executor
from rlite.data.routing import ROUTED
from rlite.engine import registry
from rlite.engine.registry import find_backend
from rlite.errors import ConfigError, DataError, ResidencyError, RliteError, UnknownOptionError, WeightSyncError
from rlite.runtime.replicas.replica import InferenceBackend, InFlightRequest
from rlite.runtime.replicas.workers import Backend
from rlite.types import GenerationHyperparameters, LLMRequest, LLMResponse, SequenceRequest, TokenChunk
from tests.contracts.executors import EXECUTORS, installed_executors
from tests.integration.modules import Qwen3Policy, on_meta
from tests.tiny import build_model_dir

GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
PROMPTS = [[1, 2, 3], [200, 7, 91, 4, 77, 8], [5]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    head_dim = 32  # vLLM's smallest
    return build_model_dir(folder, "qwen3", hidden=64, head_dim=head_dim, max_position_embeddings=16384)


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    rlite.init(device="cpu", num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


@pytest.fixture(scope="module", params=installed_executors())
def engine(request: pytest.FixtureRequest, path: Path, session: None) -> Iterator[RliteInferenceEngine]:
    engine = RliteInferenceEngine(path, executor=request.param)
    engine.build(max_model_len=max_model_len(engine), max_num_seqs=4, seed=3)
    yield engine
    engine.release()


def request_of(max_new_tokens: int = 150, extras: tuple[str, ...] = (), **gconfig: Any) -> LLMRequest:
    sampling = {"ignore_eos": True, "seed": 9, **gconfig}
    return LLMRequest(
        input_ids=[72, 73, 74],
        gconfig=GenerationHyperparameters(max_new_tokens=max_new_tokens, **sampling),
        extras=extras,
    )


def num_long(engine: RliteInferenceEngine) -> int:
    return EXECUTORS[engine.executor_name].num_long


def max_model_len(engine: RliteInferenceEngine) -> int:
    return EXECUTORS[engine.executor_name].max_model_len


def long_request(engine: RliteInferenceEngine, **gconfig: Any) -> LLMRequest:
    return request_of(num_long(engine), **gconfig)


def endless_request(engine: RliteInferenceEngine, **gconfig: Any) -> LLMRequest:
    return request_of(max_model_len(engine) - 3, **gconfig)


class Running:
    """A request that runs in a thread of its own, with the chunks that have arrived."""

    def __init__(self, engine: RliteInferenceEngine, request: LLMRequest) -> None:
        self.chunks: list[TokenChunk] = []
        self.result: LLMResponse | BaseException | None = None
        self.has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(engine, request))
        self._thread.start()
        assert self.has_begun.wait(timeout=30)

    def _run(self, engine: RliteInferenceEngine, request: LLMRequest) -> None:
        def take(chunk: TokenChunk) -> None:
            self.chunks.append(chunk)
            self.has_begun.set()

        try:
            self.result = asyncio.run(engine.agenerate(request, take))
        except Exception as error:
            self.result = error

    def wait(self) -> Any:
        self._thread.join(timeout=60)
        return self.result


@torch.no_grad()
def logprobs_of(path: Path, ids: list[int], temperature: float = 1.0) -> Tensor:
    """[len(ids) - 1, vocabulary] by transformers' own forward."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    return (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)


# -- generation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", installed_executors())
def test_the_common_options_are_known_and_others_refused_before_anything_starts(path: Path, name: str) -> None:
    options = find_backend("inference", name, InferenceBackend).options
    common = {"max_model_len": 64, "max_num_seqs": 2, "gpu_memory_utilization": 0.5, "dtype": None, "seed": 1}
    assert vars(options(**common)).items() >= common.items()
    with pytest.raises(UnknownOptionError, match="max_num_seqs"):
        RliteInferenceEngine(path, executor=name).build(max_num_seq=4)


def test_results_are_the_model_s_in_the_order_of_the_prompts(engine: RliteInferenceEngine, path: Path) -> None:
    for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        (output,) = result.outputs
        expected = logprobs_of(path, prompt + output.token_ids)[len(prompt) - 1 :]
        assert result.prompt_token_ids == prompt
        assert output.token_ids == expected.argmax(-1).tolist()
        assert output.logprobs == pytest.approx(expected.max(-1).values.tolist(), abs=5e-5)
        assert (output.finish_reason, output.versions) == ("length", [engine.get_version()] * 8)
        assert output.cumulative_logprob == pytest.approx(sum(output.logprobs))
        assert result.finished
        assert result.prompt_logprobs is None
    assert len({result.request_id for result in engine.generate(PROMPTS, GREEDY)}) == len(PROMPTS)


def test_sampled_tokens_have_both_kinds_of_logprobs(engine: RliteInferenceEngine, path: Path) -> None:
    (result,) = engine.generate([PROMPTS[0]], {"max_tokens": 6, "temperature": 0.7, "top_k": 5, "seed": 1})
    made = result.outputs[0]
    rows = logprobs_of(path, PROMPTS[0] + made.token_ids, 0.7)[len(PROMPTS[0]) - 1 :]
    chosen = rows.gather(1, torch.tensor(made.token_ids)[:, None])[:, 0]
    kept = rows.topk(5).values.logsumexp(-1)
    assert made.logprobs == pytest.approx(chosen.tolist(), abs=5e-5)
    assert made.sampling_logprobs == pytest.approx((chosen - kept).tolist(), abs=5e-5)


def test_seed_repeats_samples_beside_other_requests(engine: RliteInferenceEngine) -> None:
    sampling = {"n": 3, "max_tokens": 8, "seed": 3, "ignore_eos": True}
    alone = engine.generate([PROMPTS[0]], sampling)[0].outputs
    among_others = engine.generate(PROMPTS, sampling)[0].outputs
    assert len({tuple(output.token_ids) for output in alone}) > 1
    assert [output.token_ids for output in among_others] == [output.token_ids for output in alone]


def test_stop_conditions_end_a_completion(engine: RliteInferenceEngine) -> None:
    whole = engine.generate(["Hello"], GREEDY)[0].outputs[0]
    by_id = engine.generate(["Hello"], {**GREEDY, "stop_token_ids": [whole.token_ids[2]]})[0].outputs[0]
    first = whole.token_ids.index(whole.token_ids[2])
    assert (by_id.token_ids, by_id.finish_reason) == (whole.token_ids[: first + 1], "stop")
    stop = whole.text[2:4]
    by_text = engine.generate(["Hello"], {**GREEDY, "stop": stop})[0].outputs[0]
    assert (by_text.text, by_text.finish_reason) == (whole.text.partition(stop)[0], "stop")
    assert [output.stop_reason for output in (whole, by_id, by_text)] == [None, whole.token_ids[2], stop]


def test_a_stop_string_may_be_a_special_token(engine: RliteInferenceEngine) -> None:
    sampling = {"n": 8, "seed": 5, "max_tokens": 150, "ignore_eos": True}
    free = engine.generate(["Hello"], sampling)[0].outputs
    special = {token: engine.tokenizer.decode([token]) for token in engine.tokenizer.all_special_ids}
    names = list(special.values())
    stopped = engine.generate(["Hello"], {**sampling, "stop": names})[0].outputs
    assert any(output.finish_reason == "stop" for output in stopped)
    for whole, cut in zip(free, stopped, strict=True):
        first = next((place for place, token in enumerate(whole.token_ids) if token in special), None)
        if first is None:
            assert cut.token_ids == whole.token_ids
            continue
        assert cut.token_ids == whole.token_ids[: first + 1]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", special[whole.token_ids[first]])
        assert cut.text == engine.tokenizer.decode(whole.token_ids[:first])


def test_chunks_stream_and_add_up_to_the_response(engine: RliteInferenceEngine) -> None:
    async def both() -> tuple[list[TokenChunk], LLMResponse]:
        chunks = [chunk async for chunk in engine.stream(long_request(engine))]
        return chunks, await engine.agenerate(long_request(engine))

    chunks, response = asyncio.run(both())
    assert len(chunks) > 1, "the first tokens arrive before the last are made"
    assert [token for chunk in chunks for token in chunk.token_ids] == response.output_tokens
    assert all(len(c.token_ids) == len(c.logprobs) == len(c.sampling_logprobs) for c in chunks)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert response.output_versions == [engine.get_version()] * num_long(engine)


def test_a_prompt_that_is_too_long_and_a_callback_that_raises_end_their_own_request(
    engine: RliteInferenceEngine,
) -> None:
    async def together() -> list[Any]:
        long = LLMRequest(
            input_ids=[65] * (max_model_len(engine) + 44), gconfig=GenerationHyperparameters(max_new_tokens=4)
        )
        broken = engine.agenerate(request_of(), on_chunk=lambda chunk: chunk.no_such_field)
        return await asyncio.gather(
            engine.agenerate(long), broken, engine.agenerate(request_of()), return_exceptions=True
        )

    refused, failed, served = asyncio.run(together())
    assert isinstance(refused, DataError)
    assert f"max_model_len={max_model_len(engine)}" in str(refused)
    assert isinstance(failed, AttributeError)
    assert served.output_len == 150
    engine.pause()
    engine.resume()
    assert engine.num_in_flight == 0


def test_a_request_goes_on_from_the_tokens_that_another_replica_made(engine: RliteInferenceEngine) -> None:
    """The engine hands over the requests of a lost replica in this way."""
    whole = asyncio.run(engine.agenerate(request_of(20, seed=4)))
    seed = whole_seed(engine, 4)
    rest = InFlightRequest(
        SequenceRequest(request_id=10**9, input_ids=[72, 73, 74], gconfig=request_of(20).gconfig, seed=seed),
        token_ids=whole.output_tokens[:7],
        logprobs=whole.output_logprobs[:7],
    )
    engine._replicas.router.route([[rest]])
    rest.done.result(timeout=60)
    assert rest.token_ids == whole.output_tokens
    assert rest.logprobs == pytest.approx(whole.output_logprobs, abs=1e-4)


def whole_seed(engine: RliteInferenceEngine, seed: int) -> int:
    """The seed that the engine gives to a request that asks for this one."""
    return engine._request([1], GenerationHyperparameters(seed=seed)).seed


# -- cancel, pause, abort ----------------------------------------------------------------------------------------------


def test_a_cancelled_request_ends_and_the_others_go_on(engine: RliteInferenceEngine) -> None:
    async def cancel() -> LLMResponse:
        other = asyncio.ensure_future(engine.agenerate(request_of(60)))
        async for _ in engine.stream(request_of(seed=2)):
            break
        return await other

    assert asyncio.run(cancel()).output_len == 60
    engine.pause()
    assert engine.num_in_flight == 0
    engine.resume()


def test_pause_rests_at_a_token_boundary_and_resume_goes_on(engine: RliteInferenceEngine) -> None:
    undisturbed = asyncio.run(engine.agenerate(long_request(engine)))
    running = Running(engine, long_request(engine))
    engine.pause()
    at_rest = len(running.chunks)
    assert running.result is None
    with pytest.raises(ResidencyError, match="resume"):
        engine.generate(PROMPTS, GREEDY)
    late = threading.Thread(target=lambda: asyncio.run(engine.agenerate(request_of(4))))
    late.start()
    late.join(timeout=0.2)
    assert late.is_alive(), "requests wait"
    assert len(running.chunks) == at_rest
    engine.pause()
    engine.resume()
    late.join(timeout=30)
    assert running.wait().output_tokens == undisturbed.output_tokens


def test_abort_all_ends_requests_with_what_they_have(engine: RliteInferenceEngine) -> None:
    running = [Running(engine, endless_request(engine, seed=seed)) for seed in range(4)]
    engine.pause()
    engine.abort_all()
    assert engine.num_in_flight == 0, "paused or not"
    engine.resume()
    for each in running:
        made = [token for chunk in each.chunks for token in chunk.token_ids]
        assert (each.wait().stop_reason, each.wait().output_tokens) == ("abort", made)
    assert len(engine.generate(PROMPTS, GREEDY)) == 3


def test_tokens_carry_the_version_that_made_them(engine: RliteInferenceEngine) -> None:
    before = engine.get_version()
    running = Running(engine, long_request(engine))
    engine.set_version(before + 5)
    versions = running.wait().output_versions
    assert versions == sorted(versions)
    assert set(versions) == {before, before + 5}
    engine.set_version(before)


# -- weights -----------------------------------------------------------------------------------------------------------


def test_synced_weights_are_served_and_what_runs_goes_on_or_is_aborted(
    engine: RliteInferenceEngine, path: Path
) -> None:
    train = RliteTrainEngine(on_meta(Qwen3Policy, path))
    train.build(colocate_with=engine)
    if not engine.capabilities.has_weight_sync:
        with pytest.raises(ConfigError, match="weight_sync"):
            train.p2p_weight_sync(engine)
        return train.release()
    train.train_step([[1, 2, 3, 4, 5, 6]])
    before = engine.get_version()
    running = Running(engine, long_request(engine))
    report = train.p2p_weight_sync(engine, verify_checksums=True)
    assert report.version == engine.get_version() == before + 1
    versions = running.wait().output_versions
    assert (len(versions), versions) == (num_long(engine), sorted(versions))
    assert set(versions) == {before, before + 1}
    running = Running(engine, endless_request(engine))
    train.p2p_weight_sync(engine, on_inflight="abort")
    assert running.wait().stop_reason == "abort"
    model = AutoModelForCausalLM.from_pretrained(path)
    model.load_state_dict(train.state_dict(), strict=False)
    prompt, made = PROMPTS[0], engine.generate(PROMPTS[:1], GREEDY)[0].outputs[0]
    with torch.no_grad():
        rows = model.eval()(torch.tensor([prompt + made.token_ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert made.token_ids == rows.argmax(-1).tolist()
    assert made.logprobs == pytest.approx(rows.max(-1).values.tolist(), abs=5e-5)
    train.release()
    engine.load(path)
    assert engine.get_version() == before + 3
    engine.set_version(0)


def test_weights_that_did_not_arrive_whole_are_never_served(engine: RliteInferenceEngine, path: Path) -> None:
    running = Running(engine, endless_request(engine))
    with pytest.raises(RuntimeError, match="half-way"), engine.receiving_weights("continue"):
        raise RuntimeError("half-way")
    assert isinstance(running.wait(), WeightSyncError)
    with pytest.raises(ResidencyError, match="not written yet"):
        engine.generate(PROMPTS, GREEDY)
    engine.load(path)
    assert len(engine.generate(PROMPTS, GREEDY)) == 3


def test_every_residency_state_says_what_it_needs(engine: RliteInferenceEngine, path: Path) -> None:
    before = [result.outputs[0].token_ids for result in engine.generate(PROMPTS, GREEDY)]
    if not engine.capabilities.has_residency:
        with pytest.raises(ConfigError, match="release"):
            engine.cpu()
        return
    running = Running(engine, long_request(engine))
    with pytest.raises(ResidencyError, match="in flight"):
        engine.cpu()
    assert running.wait().output_len == num_long(engine)
    engine.cpu()
    with pytest.raises(ResidencyError, match=r"cuda\(\)"):
        engine.generate(PROMPTS, GREEDY)
    engine.cuda("weights")
    with pytest.raises(ResidencyError, match="kv_cache"):
        engine.generate(PROMPTS, GREEDY)
    engine.cuda("kv_cache")
    assert [result.outputs[0].token_ids for result in engine.generate(PROMPTS, GREEDY)] == before
    held = engine.memory_bytes()[0]["weights"]
    engine.meta()
    assert engine.memory_bytes()[0] == {"weights": 0, "kv_cache": 0}
    engine.cuda("weights", "kv_cache")
    with pytest.raises(ResidencyError, match="sync"):
        engine.generate(PROMPTS, GREEDY)
    engine.load(path)
    assert engine.memory_bytes()[0]["weights"] == held
    assert [result.outputs[0].token_ids for result in engine.generate(PROMPTS, GREEDY)] == before


# -- capabilities ------------------------------------------------------------------------------------------------------


def test_prompt_logprobs_are_right_or_refused_before_any_work(engine: RliteInferenceEngine, path: Path) -> None:
    if not engine.capabilities.has_prompt_logprobs:
        with pytest.raises(ConfigError, match=f"prompt_logprobs: the executor '{engine.executor_name}'"):
            engine.prompt_logprobs(PROMPTS)
        with pytest.raises(ConfigError, match="prompt_logprobs"):
            engine.generate(PROMPTS, {**GREEDY, "prompt_logprobs": True})
        return
    for prompt, found in zip(PROMPTS, engine.prompt_logprobs(PROMPTS), strict=True):
        rows = logprobs_of(path, prompt) if len(prompt) > 1 else torch.zeros(0, 1)
        expected = rows.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
        assert found == pytest.approx(expected.tolist(), abs=5e-5)
        (result,) = engine.generate([prompt], {**GREEDY, "prompt_logprobs": True})
        first, *others = result.prompt_logprobs or ()
        assert first is None
        assert others == pytest.approx(expected.tolist(), abs=5e-5)
    with pytest.raises(ConfigError, match="prompt_logprobs=3"):
        engine.generate(PROMPTS, {"prompt_logprobs": 3})


def test_scores_have_the_most_likely_tokens_and_wait_for_the_end_of_a_pause(
    engine: RliteInferenceEngine, path: Path
) -> None:
    for prompt, found in zip(PROMPTS, engine.score(PROMPTS, num_top=3), strict=True):
        top = logprobs_of(path, prompt).topk(3) if len(prompt) > 1 else torch.zeros(0, 3).topk(3)
        assert found.top_ids == top.indices.tolist()
        assert torch.tensor(found.top_logprobs).reshape(-1, 3).numpy() == pytest.approx(top.values.numpy(), abs=5e-5)
        assert [len(found.logprobs), len(found.top_ids)] == [len(prompt) - 1] * 2
    with pytest.raises(ConfigError, match="num_top=21"):
        engine.score(PROMPTS, num_top=21)
    with pytest.raises(DataError, match="max_model_len"):
        engine.score([[5] * max_model_len(engine)])

    async def scored_after_a_pause() -> Any:
        engine.pause()
        with pytest.raises(ResidencyError, match="paused"):
            engine.score(PROMPTS)
        scoring = asyncio.create_task(engine.ascore(PROMPTS))
        await asyncio.wait([scoring], timeout=0.2)
        assert not scoring.done()
        engine.resume()
        return await scoring

    for late, found in zip(asyncio.run(scored_after_a_pause()), engine.score(PROMPTS), strict=True):
        assert late.logprobs == pytest.approx(found.logprobs, abs=5e-5), "prompts that are computed together may differ"
        assert late.top_ids == found.top_ids


def test_extras_are_columns_of_the_tokens_and_others_are_refused(engine: RliteInferenceEngine) -> None:
    offered = tuple(sorted(engine.capabilities.extras - {ROUTED}))  # which needs a mixture of experts
    response = asyncio.run(engine.agenerate(request_of(12, offered, top_k=4)))
    assert {name: len(column) for name, column in response.extras.items()} == dict.fromkeys(offered, 12)
    if "kept_ids" in offered:
        kept = response.extras["kept_ids"]
        assert all(token in ids and len(ids) == 4 for token, ids in zip(response.output_tokens, kept, strict=True))
    assert asyncio.run(engine.agenerate(request_of(4))).extras == {}
    with pytest.raises(ConfigError, match=r"extras=\('no_such_column',\)"):
        asyncio.run(engine.agenerate(request_of(4, ("no_such_column",))))
    assert engine.num_in_flight == 0


def test_release_ends_what_is_in_flight_and_the_engine_can_be_built_again(
    engine: RliteInferenceEngine, path: Path
) -> None:
    other = RliteInferenceEngine(path, executor=engine.executor_name)
    other.build(colocate_with=engine, max_model_len=max_model_len(engine), max_num_seqs=4)
    running = Running(other, endless_request(engine))
    other.pause()
    other.release()
    assert isinstance(running.wait(), RliteError)
    with pytest.raises(RliteError, match="build"):
        other.generate(PROMPTS, GREEDY)
    other.build(colocate_with=engine, max_model_len=max_model_len(engine), max_num_seqs=4)
    assert len(other.generate(PROMPTS, GREEDY)) == 3
    other.release()


def test_a_backend_that_is_none_is_named_before_anything_starts(path: Path) -> None:
    @dataclass(frozen=True)
    class Bare:
        max_model_len: int = 8

    whole = find_backend("inference", "pushing", InferenceBackend)
    registered = dict(registry._backends)
    try:
        register_executor("inference", "bare", replace(whole, options=Bare))
        register_executor("inference", "wrong", find_backend("train", "fsdp2", Backend))
        with pytest.raises(ConfigError, match=r"'bare': its options lack .*'seed'"):
            RliteInferenceEngine(path, executor="bare")
        with pytest.raises(ConfigError, match=r"'wrong' is registered with .* expected a InferenceBackend"):
            RliteInferenceEngine(path, executor="wrong")
    finally:
        registry._backends.clear()
        registry._backends.update(registered)
