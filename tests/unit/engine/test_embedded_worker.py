from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.errors import CheckpointError, ConfigError, DivergedError, ResidencyError
from rlite.types import GenerationHyperparameters, SequenceRequest, TokenChunk
from tests.tiny import build_model_dir

CPU = torch.device("cpu")
MODELS = [(kind, tie) for kind in ("qwen2", "qwen3", "llama") for tie in (True, False)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("models")

    @cache
    def build(kind: str = "qwen2", tie: bool = True) -> str:
        return str(build_model_dir(root / f"{kind}-{tie}", kind, tie, hidden=64))

    return build


def worker_of(path: str, **options) -> EmbeddedWorker:
    return EmbeddedWorker(path, EmbeddedOptions(**{"max_model_len": 256, "max_num_seqs": 8, **options}), CPU)


def prompts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


def requests_of(prompts: list[list[int]], **gconfig) -> list[SequenceRequest]:
    hyperparameters = GenerationHyperparameters(**{"max_new_tokens": 24, **gconfig})
    return [
        SequenceRequest(request_id=i, input_ids=prompt, gconfig=hyperparameters, seed=100 + i)
        for i, prompt in enumerate(prompts)
    ]


def run(worker: EmbeddedWorker, requests: list[SequenceRequest], max_steps: int = 1000) -> dict[int, TokenChunk]:
    """Pump until everything has ended; each request's chunks joined."""
    joined: dict[int, TokenChunk] = {}
    chunks = worker.advance(requests, [], max_steps)
    while True:
        for chunk in chunks:
            before = joined.get(chunk.request_id)
            joined[chunk.request_id] = chunk if before is None else join(before, chunk)
        if not (worker._scheduler.waiting or worker._scheduler.running):
            return joined
        chunks = worker.advance([], [], max_steps)


def join(a: TokenChunk, b: TokenChunk) -> TokenChunk:
    assert a.finish_reason is None
    return TokenChunk(
        request_id=a.request_id,
        token_ids=a.token_ids + b.token_ids,
        logprobs=a.logprobs + b.logprobs,
        sampling_logprobs=a.sampling_logprobs + b.sampling_logprobs,
        version=b.version,
        finish_reason=b.finish_reason,
        error=b.error,
    )


def tokens_of(chunks: dict[int, TokenChunk]) -> dict[int, list[int]]:
    return {i: chunk.token_ids for i, chunk in chunks.items()}


@torch.no_grad()
def reference_logprobs(path: str, prompt: list[int], completion: list[int], temperature: float = 1.0) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]


@pytest.mark.parametrize(("kind", "tie"), MODELS)
def test_greedy_text_and_logprobs_equal_hugging_face(model_dir, kind: str, tie: bool) -> None:
    path = model_dir(kind, tie)
    reference = AutoModelForCausalLM.from_pretrained(path).eval()
    prompts = prompts_of(3, 40, 1, 17)
    made = run(worker_of(path, max_num_seqs=3), requests_of(prompts, temperature=0), max_steps=5)
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        whole = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert made[i].token_ids == whole[0, len(prompt) :].tolist()
        expected = reference_logprobs(path, prompt, made[i].token_ids)
        torch.testing.assert_close(torch.tensor(made[i].logprobs), expected, atol=5e-5, rtol=0)


WINDOWED = {
    "mistral": {"sliding_window": 16},
    "phi3": {"sliding_window": 16},
    "starcoder2": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize("kind", WINDOWED)
@pytest.mark.parametrize(
    "options", [{"max_prefill_tokens": 24}, {"deterministic": True}, {"dtype": "float64"}], ids=str
)
def test_sliding_windows_are_served_as_transformers_computes_them(tmp_path: Path, kind: Any, options: dict) -> None:
    path = str(build_model_dir(tmp_path / "model", kind, hidden=64, **WINDOWED[kind]))
    prompts = prompts_of(3, 40, 1, 17)
    made = run(worker_of(path, max_num_seqs=3, **options), requests_of(prompts, temperature=0, ignore_eos=True), 5)
    for i, prompt in enumerate(prompts):
        expected = reference_logprobs(path, prompt, made[i].token_ids)
        torch.testing.assert_close(torch.tensor(made[i].logprobs), expected, atol=5e-5, rtol=0)


def test_a_length_at_which_rotary_angles_change_bounds_the_longest_sequence(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    path = str(
        build_model_dir(tmp_path / "model", "llama", hidden=64, max_position_embeddings=64, rope_parameters=rope)
    )
    assert worker_of(path, max_model_len=None).max_model_len == 64
    with pytest.raises(ConfigError, match="max_model_len=65 is beyond"):
        worker_of(path, max_model_len=65)


def test_a_model_served_by_its_own_forward_makes_the_same(model_dir) -> None:
    path = model_dir("qwen3")
    requests = requests_of(prompts_of(3, 40, 1, 17), temperature=0)
    lean, own = worker_of(path, max_num_seqs=3), worker_of(path, max_num_seqs=3)
    assert lean._weights._lean is not None
    own._weights._lean = None
    expected, made = run(lean, requests, max_steps=5), run(own, requests, max_steps=5)
    assert tokens_of(made) == tokens_of(expected)
    for i, chunk in expected.items():
        assert made[i].logprobs == pytest.approx(chunk.logprobs, abs=5e-5)


def test_sampled_logprobs_are_of_the_tempered_distribution(model_dir) -> None:
    path = model_dir("qwen3")
    prompts = prompts_of(9, 30)
    made = run(worker_of(path), requests_of(prompts, temperature=0.7, ignore_eos=True))
    for i, prompt in enumerate(prompts):
        expected = reference_logprobs(path, prompt, made[i].token_ids, temperature=0.7)
        torch.testing.assert_close(torch.tensor(made[i].logprobs), expected, atol=5e-5, rtol=0)
        assert made[i].sampling_logprobs == made[i].logprobs


def test_a_sample_depends_on_its_seed_alone_not_on_the_crowd_around_it(model_dir) -> None:
    path = model_dir()
    prompts = prompts_of(5, 12, 5, 30, 8, 21, 2, 9, 17, 4)
    requests = requests_of(prompts, top_p=0.95, temperature=0.9)
    crowd = tokens_of(run(worker_of(path, max_num_seqs=3), requests, max_steps=7))
    alone = worker_of(path)
    for request in reversed(requests):
        assert tokens_of(run(alone, [request]))[request.request_id] == crowd[request.request_id]
    assert len({tuple(tokens[:4]) for tokens in crowd.values()}) > 5


def test_siblings_get_their_own_samples_from_one_prefill(model_dir) -> None:
    worker = worker_of(model_dir(), dtype="float64")  # served by the model's own forward, which has hooks
    prefilled = []
    base = worker._weights.model.base_model
    handle = base.register_forward_pre_hook(lambda _, __, kw: prefilled.append(kw["input_ids"].shape), with_kwargs=True)
    prompt = prompts_of(20)[0]
    requests = requests_of([prompt] * 5)
    together = tokens_of(run(worker, requests))
    handle.remove()
    assert [shape for shape in prefilled if shape[0] == 1 and shape[1] > 1] == [(1, 19)]
    assert len({tuple(t) for t in together.values()}) == 5
    for request in requests:
        assert tokens_of(run(worker, [request])) == {request.request_id: together[request.request_id]}


def test_chunked_prefill_equals_whole_prefill(model_dir) -> None:
    path = model_dir("llama")
    requests = requests_of(prompts_of(70, 3, 41, 70), temperature=0)
    whole = run(worker_of(path), requests)
    chunked = run(worker_of(path, max_prefill_tokens=16), requests)
    assert tokens_of(chunked) == tokens_of(whole)
    for i, chunk in whole.items():
        assert chunked[i].logprobs == pytest.approx(chunk.logprobs, abs=5e-5)


def test_running_requests_continue_unchanged_after_the_cache_is_recomputed(model_dir) -> None:
    path = model_dir("qwen3")
    requests = requests_of(prompts_of(6, 6, 25) * 2, max_new_tokens=40)
    undisturbed = tokens_of(run(worker_of(path, max_num_seqs=4), requests))
    worker = worker_of(path, max_num_seqs=4)
    first = {c.request_id: c for c in worker.advance(requests, [], 9)}
    worker.weights_changed(1)
    rest = run(worker, [])
    assert {c.version for c in first.values()} == {0}
    assert {c.version for c in rest.values()} == {1}
    joined = {i: first[i].token_ids if i in first else [] for i in undisturbed}
    for i, chunk in rest.items():
        joined[i] = joined[i] + chunk.token_ids
    assert joined == undisturbed


def test_a_later_turn_continues_from_the_cache_of_the_last_one(model_dir) -> None:
    again, alone = worker_of(model_dir(), max_num_seqs=3), worker_of(model_dir(), max_num_seqs=3)
    prompts = prompts_of(60, 47, 90, 41)
    for turn in range(3):
        found = run(again, requests_of(prompts))
        for i, request in enumerate(requests_of(prompts)):
            alone.weights_changed(0)  # forgets what it has kept
            expected = run(alone, [request])[i]
            assert found[i].token_ids == expected.token_ids
            assert found[i].logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        prompts = [[*p, *found[i].token_ids, *prompts_of(7, seed=turn)[0]] for i, p in enumerate(prompts)]
    assert again._scheduler.num_reused > sum(map(len, prompts)) / 3
    assert alone._scheduler.num_reused == 0


def test_kept_caches_end_with_the_weights_that_made_them(model_dir) -> None:
    # the text of the first run would propose tokens, and checks change the last bits
    worker, other = (worker_of(model_dir(), speculation=False) for _ in range(2))
    prompt = prompts_of(64)[0]
    run(worker, requests_of([prompt]))
    for one in (worker, other):
        for shard in one.parameter_shards().values():
            shard.tensor.mul_(1.25)
        one.weights_changed(version=1)
    assert run(worker, requests_of([prompt]))[0].logprobs == run(other, requests_of([prompt]))[0].logprobs
    assert worker._scheduler.num_reused == 0
    run(worker, requests_of([prompt]))
    assert worker._scheduler.num_reused == 63
    worker.to_cpu()
    worker.to_device()
    run(worker, requests_of([prompt]))
    assert worker._scheduler.num_reused == 63, "the cache was given back"


def test_a_deterministic_worker_reuses_prompts_alone_if_decode_and_prefill_differ(model_dir) -> None:
    worker = worker_of(model_dir(), deterministic=True, dtype="bfloat16")
    first, second = (run(worker, requests_of(prompts_of(100), ignore_eos=True))[0] for _ in range(2))
    assert first.logprobs == second.logprobs
    assert worker._scheduler.num_reused == 99
    turn = requests_of([[*prompts_of(100)[0], *first.token_ids, 5]])
    continued = run(worker, turn)[0]
    assert worker._scheduler.num_reused == 99 + 99
    assert continued == run(worker_of(model_dir(), deterministic=True, dtype="bfloat16"), turn)[0]


def test_new_weights_are_served_after_a_write_in_place(model_dir) -> None:
    path = model_dir("qwen2", False)
    worker = worker_of(path)
    requests = requests_of(prompts_of(10), temperature=0, ignore_eos=True)
    worker.advance(requests, [], 4)
    other = AutoModelForCausalLM.from_pretrained(path)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
            worker.parameter_shards()[name].tensor.copy_(parameter)
    worker.weights_changed(1)
    (chunk,) = worker.advance([], [], 1000)
    ids = requests[0].input_ids + worker_of(path).advance(requests, [], 4)[0].token_ids
    whole = other.eval().generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert chunk.token_ids == whole[0, len(ids) :].tolist()


def test_abort_ends_requests_with_what_they_have_and_leaves_the_others_alone(model_dir) -> None:
    path = model_dir()
    requests = requests_of(prompts_of(7, 9, 11, 13), ignore_eos=True)
    undisturbed = tokens_of(run(worker_of(path), requests))
    worker = worker_of(path, max_num_seqs=3, speculation=False)
    worker.advance(requests, [], 5)
    chunks = {c.request_id: c for c in worker.advance([], [0, 3, 99], 1000)}
    assert chunks[0].finish_reason == chunks[3].finish_reason == "abort"
    assert (chunks[0].token_ids, chunks[3].token_ids) == ([], [])
    assert undisturbed[1][5:] == chunks[1].token_ids
    assert undisturbed[2][5:] == chunks[2].token_ids
    worker.advance(requests, [], 5)
    assert sorted(c.request_id for c in worker.advance([], list(range(4)), 0)) == [0, 1, 2, 3]
    assert not (worker._scheduler.waiting)
    assert not (worker._scheduler.running)
    assert worker.advance([], [], 5) == []


def test_a_completion_ends_at_stop_tokens_stop_strings_and_lengths(model_dir) -> None:
    path = model_dir()
    prompts = prompts_of(12)
    free = tokens_of(run(worker_of(path), requests_of(prompts, ignore_eos=True, max_new_tokens=60)))[0]
    letters = byte_tokenizer()

    def finish(**gconfig) -> tuple[list[int], str | None]:
        chunk = run(worker_of(path), requests_of(prompts, **{"ignore_eos": True, "max_new_tokens": 60, **gconfig}))[0]
        return chunk.token_ids, chunk.finish_reason

    assert finish() == (free, "length")
    assert finish(max_new_tokens=1) == (free[:1], "length")
    stop = free[20]
    first = free.index(stop)
    assert finish(stop_token_ids=[stop]) == (free[: first + 1], "stop")
    made, reason = finish(stop_token_ids=[stop], min_new_tokens=40)
    assert stop not in made[:40]
    assert len(made) >= 40
    assert reason in ("stop", "length")
    # a byte that is a whole character by itself, and the first place where the text has it
    position = next(i for i, t in enumerate(free) if i > 4 and letters.decode([t]).isalnum())
    text = letters.decode([free[position]])
    first = next(i for i in range(len(free)) if text in letters.decode(free[: i + 1]))
    assert finish(stop=text) == (free[: first + 1], "stop")
    chunk = run(worker_of(path, max_model_len=20), requests_of(prompts, ignore_eos=True))[0]
    assert (len(chunk.token_ids), chunk.finish_reason) == (8, "length")


def test_the_models_own_end_token_ends_a_completion_unless_it_is_ignored(model_dir) -> None:
    path = model_dir("llama", False)
    requests = requests_of(prompts_of(*range(3, 13)), max_new_tokens=200)
    end = byte_tokenizer().eos_token_id
    made = run(worker_of(path), requests)
    stopped = [c for c in made.values() if c.finish_reason == "stop"]
    assert stopped
    assert all(c.token_ids.index(end) == len(c.token_ids) - 1 for c in stopped)
    assert all(end not in c.token_ids for c in made.values() if c.finish_reason == "length")
    ignoring = requests_of([r.input_ids for r in requests], max_new_tokens=200, ignore_eos=True)
    assert {c.finish_reason for c in run(worker_of(path), ignoring).values()} == {"length"}


def test_a_request_that_cannot_be_served_is_refused_alone(model_dir) -> None:
    path = model_dir()
    good, long, foreign = [1, 2, 3], [1] * 32, [1, 259]
    requests = requests_of([good, long, foreign, [], [-1], [1] * 31])
    made = run(worker_of(path, max_model_len=32), requests)
    assert "32 tokens" in made[1].error
    assert "259" in made[2].error
    assert "empty" in made[3].error
    assert "-1" in made[4].error
    assert all(made[i].token_ids == [] and made[i].finish_reason is None for i in (1, 2, 3, 4))
    assert made[0].error is None
    assert made[0].finish_reason is not None
    assert len(made[5].token_ids) == 1


def test_a_prompt_that_overflows_the_model_fails_alone_and_leaves_nothing_in_its_slot(model_dir) -> None:
    worker, token = worker_of(model_dir("llama", False), max_num_seqs=2, speculation=False), 255
    for name, shard in worker.parameter_shards().items():
        if name.endswith("embed_tokens.weight"):
            shard.tensor[:, 0] = torch.arange(len(shard.tensor)) == token
        elif "layers.0.self_attn.q_proj" in name or "layers.0.self_attn.k_proj" in name:
            shard.tensor[:, 0] = torch.finfo(torch.float32).max  # finite, and its product with that one token is not
    good, other = requests_of(prompts_of(5, 9), greedy=True, ignore_eos=True)
    expected = run(worker, [good, other])
    overflowing = SequenceRequest(request_id=2, input_ids=[1, token, *range(20)], gconfig=good.gconfig, seed=0)
    made = run(worker, [overflowing, good])
    assert "not finite, though the weights are" in made[2].error
    assert made[2].finish_reason is None
    assert made[0] == expected[0]
    assert run(worker, [good, other]) == expected, "the slot holds nothing of it"


@pytest.mark.parametrize("options", [{}, {"deterministic": True, "max_num_seqs": 16}])
def test_a_request_that_may_make_no_token_is_refused_or_fails_alone(model_dir, options: dict) -> None:
    worker = worker_of(model_dir("qwen3"), speculation=False, **options)
    (good,) = requests_of(prompts_of(7))
    stops = list(range(worker.vocab_size))
    all_banned, greedy, rest_masked = (
        replace(good, request_id=i, gconfig=GenerationHyperparameters(max_new_tokens=8, min_new_tokens=3, **more))
        for i, more in enumerate(
            ({"stop_token_ids": stops}, {"stop_token_ids": stops, "greedy": True}, {"stop_token_ids": stops[1:]}), 1
        )
    )
    expected = run(worker, [good])[0].token_ids
    logits_of = worker._weights.logits

    def without_token_0(*args: Any) -> torch.Tensor:
        logits = logits_of(*args).clone()
        logits[1:, 0] = float("-inf")
        return logits

    worker._weights.logits = without_token_0
    made = run(worker, [good, all_banned, greedy, rest_masked])
    assert made[1].error == made[2].error == "min_new_tokens=3, and every token is a stop token: none may be made"
    assert made[3].error is not None
    assert (made[0].token_ids, made[0].error) == (expected, None)


def test_a_tokenizer_that_fails_costs_the_requests_that_need_it(model_dir, tmp_path: Path) -> None:
    path = shutil.copytree(model_dir(), tmp_path / "model")
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    requests = requests_of(prompts_of(4, 5, 6), stop=["x"])
    plain = requests_of(prompts_of(7))[0]
    made = run(worker_of(str(path)), [replace(plain, request_id=3), *requests])
    assert all("stop strings need a tokenizer" in made[i].error for i in range(3))
    assert made[3].finish_reason is not None


def test_memory_can_be_given_back_and_weights_come_back_from_the_checkpoint(model_dir) -> None:
    worker = worker_of(model_dir("qwen3"))
    requests = requests_of(prompts_of(7, 9))
    expected = tokens_of(run(worker, requests))
    held = worker.memory_bytes()
    assert held["weights"] > 0
    assert held["kv_cache"] == 2 * 2 * (8 * 256 + 64) * 2 * 16 * 4
    worker.to_meta()
    assert worker.memory_bytes() == {"weights": 0, "kv_cache": 0}
    with pytest.raises(ResidencyError, match="weights"):
        worker.advance(requests, [], 1)
    worker.to_device("weights")
    with pytest.raises(ResidencyError, match="kv_cache"):
        worker.advance(requests, [], 1)
    worker.to_device("kv_cache")
    worker.load_weights()
    assert worker.memory_bytes() == held
    assert tokens_of(run(worker, requests)) == expected


def test_a_small_cache_makes_the_same_tokens_with_fewer_sequences_at_once(model_dir) -> None:
    path = model_dir("qwen3")
    page = 64 * 2 * 2 * 2 * 16 * 4
    requests = requests_of(prompts_of(60, 3, 120, 60, 17, 90), ignore_eos=True, max_new_tokens=100)
    requests += [replace(requests[2], request_id=6, seed=7), replace(requests[3], request_id=7, seed=8)]
    expected, small = run(worker_of(path), requests), worker_of(path, kv_cache_memory_bytes=8 * page)
    assert small.memory_bytes()["kv_cache"] == 8 * page
    for steps in (5, 1000):
        made = run(small, requests, max_steps=steps)
        assert small._scheduler.num_preempted
        assert tokens_of(made) == tokens_of(expected)
        for i, chunk in expected.items():
            assert made[i].logprobs == pytest.approx(chunk.logprobs, abs=5e-5)
    small._scheduler.pool.forget()
    assert small._scheduler.pool.num_available == 7


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_interrupted_requests_keep_their_bits_in_deterministic_mode(model_dir, dtype: str) -> None:
    path, page = model_dir("qwen3"), 64 * 2 * 2 * 2 * 16 * (4 if dtype == "float32" else 8)
    requests = requests_of(prompts_of(60, 3, 120, 60), ignore_eos=True, max_new_tokens=100)
    requests += [replace(requests[2], request_id=4, seed=7)]
    options = {"deterministic": True, "dtype": dtype}
    small = worker_of(path, kv_cache_memory_bytes=6 * page, **options)
    assert run(small, requests, max_steps=7) == run(worker_of(path, **options), requests)
    assert bool(small._scheduler.num_preempted) == (dtype == "float32")


def test_a_cache_without_room_for_one_sequence_is_refused_at_build(model_dir) -> None:
    with pytest.raises(
        ConfigError, match=r"max_model_len=256 needs 0.2 MiB of KV cache, 0.1 MiB are left at kv_cache_"
    ):
        worker_of(model_dir(), kv_cache_memory_bytes=4 * 64 * 2 * 2 * 2 * 16 * 4)


def test_offloading_in_the_middle_loses_nothing(model_dir) -> None:
    path = model_dir()
    requests = requests_of(prompts_of(7, 9))
    expected = tokens_of(run(worker_of(path), requests))
    worker = worker_of(path)
    begun = {c.request_id: c.token_ids for c in worker.advance(requests, [], 6)}
    worker.to_cpu()
    assert worker.memory_bytes()["kv_cache"] == 0
    worker.to_device("all")
    rest = tokens_of(run(worker, []))
    assert {i: begun[i] + rest.get(i, []) for i in begun} == expected


@pytest.mark.parametrize("outer", [init_empty_weights, lambda: torch.device("meta")])
def test_a_worker_can_be_built_inside_somebodys_meta_context(model_dir, outer) -> None:
    path = model_dir()
    requests = requests_of(prompts_of(9), temperature=0)
    expected = tokens_of(run(worker_of(path), requests))
    with outer():
        worker = worker_of(path)
        assert not any(s.tensor.is_meta for s in worker.parameter_shards().values())
        assert tokens_of(run(worker, requests)) == expected


def test_parameters_are_named_once_and_shaped_as_in_the_checkpoint(model_dir) -> None:
    for tie in (True, False):
        path = model_dir("qwen2", tie)
        shards = worker_of(path).parameter_shards()
        assert ("lm_head.weight" in shards) is not tie
        reference = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
        assert shards.keys() == reference.keys()
        for name, shard in shards.items():
            assert shard.global_shape == tuple(shard.tensor.shape)
            assert not any(shard.offset)
            assert torch.equal(shard.tensor, reference[name])


def test_options_and_checkpoints_that_cannot_work_are_refused_with_their_names(model_dir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="flaot32"):
        EmbeddedOptions(dtype="flaot32")
    with pytest.raises(ConfigError, match="max_num_seqs=0"):
        EmbeddedOptions(max_num_seqs=0)
    with pytest.raises(ConfigError, match="max_position_embeddings=2048"):
        worker_of(model_dir(), max_model_len=4096)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        worker_of(str(tmp_path))
    assert (
        worker_of(model_dir(), dtype="bfloat16").parameter_shards()["model.norm.weight"].tensor.dtype == torch.bfloat16
    )


def test_half_precision_serves_the_same_contract(model_dir) -> None:
    path = model_dir("qwen3")
    prompts = prompts_of(9, 30)
    made = run(worker_of(path, dtype="bfloat16"), requests_of(prompts, ignore_eos=True))
    for i, prompt in enumerate(prompts):
        expected = reference_logprobs(path, prompt, made[i].token_ids)
        assert (torch.tensor(made[i].logprobs) - expected).abs().mean() < 0.1


def test_weights_that_are_not_finite_are_named_instead_of_served(tmp_path):
    path = build_model_dir(tmp_path / "model", "qwen3", hidden=64)
    worker = EmbeddedWorker(str(path), EmbeddedOptions(max_model_len=64, max_num_seqs=2), torch.device("cpu"))
    next(iter(worker.parameter_shards().values())).tensor.fill_(float("nan"))
    request = SequenceRequest(request_id=0, input_ids=[1, 2], gconfig=GenerationHyperparameters(), seed=0)
    with pytest.raises(DivergedError, match="policy version 0 hold NaN or infinity"):
        worker.advance([request], [], 4)


@pytest.mark.parametrize("cut", [1, 7, 23])
def test_a_completion_goes_on_in_another_worker_as_if_it_had_made_all_of_it(model_dir, cut: int) -> None:
    path = model_dir("qwen3")
    requests = requests_of(prompts_of(5, 12), ignore_eos=True, top_k=50)
    whole = run(worker_of(path), requests)
    rest = run(worker_of(path), [replace(r, output_ids=whole[r.request_id].token_ids[:cut]) for r in requests])
    for i, chunk in whole.items():
        assert rest[i].token_ids == chunk.token_ids[cut:], "the same random numbers"
        assert rest[i].logprobs == pytest.approx(chunk.logprobs[cut:], abs=5e-5)
        assert rest[i].finish_reason == "length"


def test_tokens_of_a_lost_worker_count_for_limits_and_stop_strings(model_dir) -> None:
    path = model_dir("llama", False)
    (request,) = requests_of(prompts_of(5), temperature=0, ignore_eos=True)
    made = run(worker_of(path), [request])[0].token_ids
    text = byte_tokenizer().decode(made)
    place = next(i for i in range(4, len(text) - 2) if text.find(text[i : i + 3]) == i and text[i : i + 3].isascii())
    stop = text[place : place + 3]
    stopping = replace(request, gconfig=request.gconfig.new(stop=(stop,)))
    length = len(run(worker_of(path), [stopping])[0].token_ids)
    for cut in range(length - 3, length):  # the stop string begins before the cut and ends behind it
        rest = run(worker_of(path), [replace(stopping, output_ids=made[:cut])])[0]
        assert (rest.token_ids, rest.finish_reason) == (made[cut:length], "stop")
    limited = replace(request, gconfig=request.gconfig.new(max_new_tokens=12), output_ids=made[:11])
    assert len(run(worker_of(path), [limited])[0].token_ids) == 1
    end = made.index(made[15])
    early = replace(request, gconfig=request.gconfig.new(stop_token_ids=(made[15],), min_new_tokens=end + 2))
    whole = run(worker_of(path), [early])[0].token_ids
    assert len(whole) >= end + 2
    rest = run(worker_of(path), [replace(early, output_ids=whole[:end])])[0]
    assert whole[:end] + rest.token_ids == whole
