"""The inference engine on one device: prompts, streams, pauses, aborts, and what it refuses."""

import asyncio
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding

import rlite
from rlite import RliteInferenceEngine
from rlite.errors import ConfigError, DataError, ResidencyError, UnknownOptionError
from rlite.rollout import CollectorOptions
from rlite.types import GenerationHyperparameters, LLMRequest
from tests.tiny import build_model_dir

GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def path(models):
    return models["qwen3"]


@pytest.fixture(scope="module")
def engine(path):
    rlite.init(num_devices=1, num_threads=1)
    engine = RliteInferenceEngine(path)
    engine.build(max_model_len=1024, max_num_seqs=8)
    yield engine
    rlite.shutdown()


def long_request(seed=1, max_new_tokens=200):
    gconfig = GenerationHyperparameters(max_new_tokens=max_new_tokens, ignore_eos=True, seed=seed)
    return LLMRequest(input_ids=[72, 73, 74], gconfig=gconfig)


async def begun(engine, request):
    """The task of a request that has its first tokens."""
    has_tokens = threading.Event()
    task = asyncio.ensure_future(engine.agenerate(request, lambda chunk: has_tokens.set()))
    while not has_tokens.is_set():
        await asyncio.sleep(0)
    return task


def test_results_keep_the_order_of_prompts_of_any_form(engine, path):
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = ["a", "Hello, world!", "你好"]
    as_ids = [tokenizer(text)["input_ids"] for text in texts]
    from_text = engine.generate(texts, GREEDY)
    from_ids = engine.generate(as_ids, GREEDY)
    from_dicts = engine.generate([{"prompt_token_ids": ids} for ids in as_ids], GREEDY)
    alone = engine.generate({"prompt_token_ids": as_ids[1]}, GREEDY)
    from_encoding = engine.generate([BatchEncoding({"input_ids": torch.tensor([ids])}) for ids in as_ids], GREEDY)
    assert [output.outputs[0].token_ids for output in from_encoding] == [o.outputs[0].token_ids for o in from_dicts]
    for wrong in ([1.5], [True], {"ids": [1]}, BatchEncoding({"input_ids": [[1], [2]]})):
        with pytest.raises(DataError, match="prompt 0"):
            engine.generate([wrong], GREEDY)
    assert alone[0].outputs[0].token_ids == from_text[1].outputs[0].token_ids
    assert [output.prompt for output in from_text] == texts
    assert [output.prompt_token_ids for output in from_text] == as_ids
    for other in (from_ids, from_dicts):
        assert [o.outputs[0].token_ids for o in other] == [o.outputs[0].token_ids for o in from_text]


def test_logprobs_are_those_of_the_model(engine, path):
    output = engine.generate(["The"], {"max_tokens": 10, "temperature": 0.7, "seed": 5, "ignore_eos": True})[0]
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    made = output.outputs[0].token_ids
    ids = torch.tensor([output.prompt_token_ids + made])
    with torch.no_grad():
        logprobs = (model(ids).logits[0] / 0.7).log_softmax(-1)
    expected = [logprobs[len(output.prompt_token_ids) - 1 + i, token].item() for i, token in enumerate(made)]
    assert output.outputs[0].logprobs == pytest.approx(expected, abs=5e-5)


def test_samples_of_one_prompt_differ_and_a_seed_repeats_them(engine):
    sampling = {"n": 4, "max_tokens": 8, "seed": 3}
    first, second = (engine.generate(["x"], sampling)[0].outputs for _ in range(2))
    assert len({tuple(o.token_ids) for o in first}) > 1
    assert [o.token_ids for o in first] == [o.token_ids for o in second]
    assert [o.index for o in first] == [0, 1, 2, 3]


def test_a_stop_string_ends_the_text_before_it(engine):
    text = engine.generate(["Hello"], GREEDY)[0].outputs[0].text
    stop = text[4:6]
    stopped = engine.generate(["Hello"], {**GREEDY, "stop": stop})[0].outputs[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == text.partition(stop)[0]


def test_tokens_stream_as_they_are_made_and_add_up_to_the_response(engine):
    async def both():
        chunks = [chunk async for chunk in engine.stream(long_request(max_new_tokens=40))]
        return chunks, await engine.agenerate(long_request(max_new_tokens=40))

    chunks, response = asyncio.run(both())
    assert len(chunks) > 2
    assert [token for chunk in chunks for token in chunk.token_ids] == response.output_tokens
    assert [chunk.finish_reason for chunk in chunks][:-1] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == response.stop_reason == "length"
    assert response.output_versions == [engine.get_version()] * 40
    assert 0 < response.ttft <= response.latency


def test_a_cancelled_request_leaves_its_slot(engine):
    async def cancel():
        task = await begun(engine, long_request())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    engine.generate(["x"], GREEDY)
    assert engine.num_in_flight == 0


def test_a_stream_that_is_left_early_and_a_callback_that_raises_end_their_own_request_alone(engine):
    async def leave():
        async for _ in engine.stream(long_request()):
            break  # the loop closes while the replica still makes tokens

    asyncio.run(leave())

    async def both():
        broken = engine.agenerate(long_request(), on_chunk=lambda chunk: chunk.no_such_field)
        return await asyncio.gather(broken, engine.agenerate(long_request(seed=2)), return_exceptions=True)

    failed, served = asyncio.run(both())
    assert isinstance(failed, AttributeError)
    assert served.output_len == 200
    engine.generate(["x"], GREEDY)
    assert engine.num_in_flight == 0


def test_requests_that_were_given_up_are_not_in_the_way_of_a_move(engine, path):
    with pytest.raises(DataError, match="max_model_len=1024"):
        engine.generate([[65] * 1100, *[[65, 66]] * 7], {"max_tokens": 200, "ignore_eos": True})
    engine.cpu()
    engine.abort_all()
    engine.cuda()
    engine.generate(["x"], GREEDY)


def test_pause_rests_at_a_token_boundary_and_resume_goes_on(engine):
    undisturbed = asyncio.run(engine.agenerate(long_request(seed=9)))

    async def interrupted():
        task = await begun(engine, long_request(seed=9))
        engine.pause()
        await asyncio.sleep(0.1)
        assert not task.done()
        engine.resume()
        return await task

    assert asyncio.run(interrupted()).output_tokens == undisturbed.output_tokens


def test_abort_all_ends_requests_with_what_they_have(engine):
    responses = []
    waiter = threading.Thread(
        target=lambda: responses.append(asyncio.run(engine.agenerate(long_request(max_new_tokens=1000))))
    )
    started = threading.Event()

    async def first_token():
        async for _ in engine.stream(long_request(seed=2, max_new_tokens=1000)):
            started.set()

    other = threading.Thread(target=lambda: asyncio.run(first_token()))
    other.start()
    started.wait(timeout=30)
    waiter.start()
    while engine.num_in_flight < 2:
        started.wait(timeout=0.001)
    engine.abort_all()
    waiter.join(timeout=30)
    other.join(timeout=30)
    assert responses[0].stop_reason == "abort"
    assert engine.num_in_flight == 0


def test_a_prompt_that_is_too_long_is_an_error_of_that_request_alone(engine):
    async def both():
        long = LLMRequest(input_ids=[65] * 1100, gconfig=GenerationHyperparameters(max_new_tokens=4))
        return await asyncio.gather(engine.agenerate(long), engine.agenerate(long_request()), return_exceptions=True)

    refused, served = asyncio.run(both())
    assert isinstance(refused, DataError)
    assert "max_model_len=1024" in str(refused)
    assert served.output_len == 200


@pytest.mark.parametrize(
    ("prompts", "sampling", "error", "says"),
    [
        ([], None, DataError, "at least one prompt"),
        ([3.5], None, DataError, "prompt 0"),
        (["fine", None], None, DataError, "prompt 1"),
        ([[1, "2"]], None, DataError, "token ids"),
        ([""], None, DataError, "empty"),
        ([[10**6]], None, DataError, "vocabulary"),
        (["x"], {"temprature": 1}, UnknownOptionError, "did you mean 'temperature'"),
        (["x"], {"top_p": 0}, ConfigError, "top_p"),
        (["x"], {"max_tokens": 3, "max_new_tokens": 3}, ConfigError, "twice"),
    ],
)
def test_bad_input_is_named(engine, prompts, sampling, error, says):
    with pytest.raises(error, match=says):
        engine.generate(prompts, sampling)


def test_every_residency_state_says_what_it_needs(engine, path):
    before = engine.generate(["Hello"], GREEDY)[0].outputs[0].token_ids
    engine.cpu()
    with pytest.raises(ResidencyError, match=r"cuda\(\)"):
        engine.generate(["Hello"], GREEDY)
    engine.cuda("weights")
    with pytest.raises(ResidencyError, match="kv_cache"):
        engine.generate(["Hello"], GREEDY)
    engine.cuda("kv_cache")
    assert engine.generate(["Hello"], GREEDY)[0].outputs[0].token_ids == before
    engine.meta()
    assert engine.memory_bytes()[0] == {"weights": 0, "kv_cache": 0}
    with pytest.raises(ResidencyError, match="gone"):
        engine.cuda()
    engine.cuda("kv_cache", "weights")
    with pytest.raises(ResidencyError, match="sync"):
        engine.generate(["Hello"], GREEDY)
    engine.load(path)
    assert engine.generate(["Hello"], GREEDY)[0].outputs[0].token_ids == before


def test_parts_come_to_the_device_in_any_form_that_names_them(engine):
    before = engine.generate(["Hello"], GREEDY)[0].outputs[0].token_ids
    for forms in [
        ("weights", "kv_cache"),
        (["weights", "kv_cache"],),
        ("weights", "weights", "kv_cache"),
        ("all",),
        (),
    ]:
        engine.cpu()
        engine.cuda(*forms)
        assert engine.generate(["Hello"], GREEDY)[0].outputs[0].token_ids == before
    engine.to("cpu")
    engine.to(torch.device("cuda"))
    assert engine.generate(["Hello"], GREEDY)[0].outputs[0].token_ids == before


@pytest.mark.parametrize(
    ("parts", "options", "says"),
    [
        (("weight",), {}, r"cuda\('weight'\): expected"),
        (("weights", 0), {}, r"cuda\('weights', 0\): expected"),
        ((["weights", "cache"],), {}, r"cuda\(\['weights', 'cache'\]\): expected"),
        ((), {"device": 0}, r"cuda\(device=0\): expected"),
    ],
)
def test_parts_that_are_none_are_named(engine, parts, options, says):
    with pytest.raises(ConfigError, match=says):
        engine.cuda(*parts, **options)


def test_without_parameters_a_completion_may_take_what_the_context_leaves(engine):
    default = GenerationHyperparameters.from_mapping(None)
    assert default == LLMRequest(input_ids=[1]).gconfig == GenerationHyperparameters(max_new_tokens=16384)
    (answer,) = engine.generate([[1] * (engine.options.max_model_len - 3)])
    assert len(answer.outputs[0].token_ids) <= 3
    assert answer.outputs[0].finish_reason in ("stop", "length")


def test_a_routing_function_sees_the_loads_of_the_replicas(engine, path):
    seen = []

    def first(loads, home):
        seen.append((dict(loads), home))
        return min(loads)

    routed = RliteInferenceEngine(path, routing=first)
    routed.build(colocate_with=engine, data_parallel_size=1, max_num_seqs=2)
    assert len(routed.generate([[5]], {"max_tokens": 1})) == 1
    assert seen == [({0: 0}, None)]
    routed.release()


def test_options_of_rollouts_that_come_too_late_are_refused(engine):
    engine.rollout_options = options = CollectorOptions(request_retries=1)
    assert engine.collector.options is options
    with pytest.raises(ConfigError, match="set them before the first rollout"):
        engine.rollout_options = CollectorOptions()


def test_wrong_engines_are_refused_before_anything_starts(path, tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        RliteInferenceEngine(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="unknown inference executor 'vlm'"):
        RliteInferenceEngine(path, executor="vlm")
    engine = RliteInferenceEngine(path)
    with pytest.raises(ConfigError, match="dtype"):
        engine.build(dtype="float31")
    with pytest.raises(UnknownOptionError, match="did you mean 'max_num_seqs'"):
        engine.build(max_num_seq=4)
    with pytest.raises(ConfigError, match="tensor_parallel_size=3"):
        engine.build(tensor_parallel_size=3)


def test_a_completion_that_ends_at_the_default_context_says_so_once(engine, tmp_path, caplog):
    path = build_model_dir(tmp_path / "long", hidden=64, layers=1, max_position_embeddings=8192)
    unbounded = RliteInferenceEngine(path)
    unbounded.build(colocate_with=engine, data_parallel_size=1, max_num_seqs=2)
    wanted = {"max_tokens": 20, "ignore_eos": True}
    for _ in range(2):
        (made,) = unbounded.generate([[5] * 4090], wanted)
        assert len(made.outputs[0].token_ids) == 6
    (warning,) = [record.getMessage() for record in caplog.records if "context length" in record.getMessage()]
    assert "after 6 of 20 new tokens, at the default context length of 4096 tokens" in warning
    with pytest.raises(DataError, match=r"max_model_len=4096 \(the default: .*\) leaves room for 4095"):
        unbounded.generate([[5] * 5000], wanted)
    unbounded.release()
