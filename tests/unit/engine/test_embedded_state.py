"""Sequences of models with a recurrent state are served as transformers computes them whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.embedded.attention import equal_chunks
from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.scheduler import Chunk
from rlite.backends.embedded.state import SlotStates
from rlite.backends.embedded.worker import EmbeddedWorker, refusal
from rlite.types import GenerationHyperparameters, SequenceRequest, TokenChunk
from tests.hybrids import hybrid, hybrid_config, save_hybrid
from tests.marks import nightly

KINDS = ["qwen3_5_text", "lfm2", "falcon_h1", "bamba", "nemotron_h"]
QUICK = [
    "qwen3_5_text",
    "falcon_h1",
    *nightly("lfm2", "bamba", "nemotron_h"),
]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hybrids")
    return {kind: save_hybrid(hybrid(kind), root / kind) for kind in KINDS}


def worker_of(folder: Path, **options: Any) -> EmbeddedWorker:
    return EmbeddedWorker(str(folder), EmbeddedOptions(**{"max_model_len": 256, "max_num_seqs": 3, **options}), CPU)


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(16, 256, (n,), generator=generator).tolist() for n in lengths]


def requests_of(prompts: list[list[int]], **gconfig: Any) -> list[SequenceRequest]:
    given = GenerationHyperparameters(**{"max_new_tokens": 9, "temperature": 2.0, **gconfig})
    return [SequenceRequest(request_id=i, input_ids=p, gconfig=given, seed=i) for i, p in enumerate(prompts)]


def run(worker: EmbeddedWorker, requests: list[SequenceRequest], max_steps: int = 4) -> dict[int, TokenChunk]:
    """Pump until everything has ended; each request's chunks joined."""
    joined: dict[int, TokenChunk] = {}
    while requests or worker._scheduler.waiting or worker._scheduler.running:
        for chunk in worker.advance(requests, [], max_steps):
            assert chunk.error is None
            if (before := joined.get(chunk.request_id)) is not None:
                tokens, logprobs = before.token_ids + chunk.token_ids, before.logprobs + chunk.logprobs
                chunk = replace(chunk, token_ids=tokens, logprobs=logprobs)
            joined[chunk.request_id] = chunk
        requests = []
    return joined


def check(kind: str, requests: list[SequenceRequest], made: dict[int, TokenChunk]) -> None:
    """Log-probabilities are those of the whole sequence's forward."""
    model = hybrid(kind)
    for request in requests:
        chunk, prompt = made[request.request_id], [*request.input_ids, *request.output_ids]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + chunk.token_ids]), use_cache=False).logits[0]
        expected = (logits[len(prompt) - 1 : -1] / request.gconfig.temperature).log_softmax(-1)
        expected = expected.gather(1, torch.tensor(chunk.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(chunk.logprobs), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", QUICK)
@pytest.mark.parametrize("options", [{}, {"max_prefill_tokens": 24}], ids=str)
def test_a_crowd_of_siblings_and_others_is_served_as_transformers_computes_it(
    kind: str, options: dict[str, Any], folders: dict[str, Path]
) -> None:
    """Slots move, prompts are cut into chunks, a prompt of one token has no prefill, and siblings come late."""
    prompts = prompts_of(3, 75, 1, 17)
    requests = requests_of([prompts[1], prompts[1], *prompts, prompts[1]], ignore_eos=True)
    requests[2] = replace(requests[2], gconfig=replace(requests[2].gconfig, max_new_tokens=3))
    made = run(worker_of(folders[kind], **options), requests)
    check(kind, requests, made)
    assert made[0].token_ids != made[1].token_ids


@pytest.mark.parametrize("kind", QUICK)
def test_prompts_of_equal_length_share_a_call_of_each_mixer(kind: str, folders: dict[str, Path]) -> None:
    requests = requests_of(prompts_of(20, 7, 20, 20), ignore_eos=True)
    check(kind, requests, run(worker_of(folders[kind], max_num_seqs=4), requests))
    fresh = [Chunk(row, 0, length, [5] * length) for row, length in enumerate((19, 6, 19))]
    assert equal_chunks([*fresh, Chunk(3, 19, 38, [5] * 19), Chunk(4, 0, 64, [5] * 19, 45)]) == [[0, 2, 4], [1], [3]]


@pytest.mark.parametrize("kind", QUICK)
def test_turns_continue_a_state_and_a_shorter_prefix_begins_anew(kind: str, folders: dict[str, Path]) -> None:
    worker = worker_of(folders[kind])
    prompt, further = prompts_of(40, 5)
    first = requests_of([prompt])
    made = run(worker, first)
    check(kind, first, made)
    turn = requests_of([[*prompt, *made[0].token_ids, *further]])
    made = run(worker, turn)
    check(kind, turn, made)
    assert (before := worker._scheduler.num_reused) > len(prompt)
    branch = requests_of([[*prompt, *further]])
    check(kind, branch, run(worker, branch))
    assert worker._scheduler.num_reused == before


@pytest.mark.parametrize("kind", QUICK)
def test_an_interrupted_request_resumes_from_its_state_and_new_weights_forget_it(
    kind: str, folders: dict[str, Path]
) -> None:
    worker = worker_of(folders[kind])
    requests = requests_of(prompts_of(40), max_new_tokens=12, ignore_eos=True)
    whole = run(worker_of(folders[kind]), requests)[0]
    (chunk,) = worker.advance(requests, [], 5)
    worker.advance([], [0], 0)
    resumed = [replace(requests[0], output_ids=chunk.token_ids)]
    made = run(worker, resumed)
    assert worker._scheduler.num_reused == 44
    assert chunk.token_ids + made[0].token_ids == whole.token_ids
    check(kind, resumed, made)
    worker.advance(requests, [], 5)
    worker.weights_changed(1)
    assert run(worker, [])[0].token_ids == whole.token_ids[5:]
    assert worker._scheduler.num_reused == 44


@pytest.mark.parametrize("is_string", [False, True])
def test_the_next_turn_continues_the_state_at_a_stop(is_string: bool, folders: dict[str, Path]) -> None:
    prompt = prompts_of(40)[0]
    free = run(worker_of(folders["lfm2"]), requests_of([prompt], max_new_tokens=30, ignore_eos=True))[0].token_ids
    texts = [byte_tokenizer().decode([token]) for token in free]
    index = next(i for i, text in enumerate(texts[2:], start=2) if text.isascii() and text not in texts[:i])
    stop = {"stop": [texts[index]]} if is_string else {"stop_token_ids": [free[index]]}
    worker = worker_of(folders["lfm2"])
    made = run(worker, requests_of([prompt], max_new_tokens=30, ignore_eos=True, **stop), max_steps=30)
    assert made[0].token_ids == free[: index + 1]
    turn = requests_of([[*prompt, *made[0].token_ids, 20, 21]])
    check("lfm2", turn, run(worker, turn))
    assert worker._scheduler.num_reused == len(prompt) + index


def test_logprobs_of_prompts_in_pieces_continue_the_states_of_their_earlier_pieces(folders: dict[str, Path]) -> None:
    for kind in ("qwen3_5_text", "bamba"):
        worker, model = worker_of(folders[kind], max_prefill_tokens=16), hybrid(kind)
        prompts = prompts_of(40, 3, 21)
        for prompt, scores in zip(prompts, worker.prompt_logprobs(prompts, 1), strict=True):
            ids = torch.tensor([prompt])
            with torch.no_grad():
                expected = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            expected = expected.gather(1, ids[0, 1:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(scores.logprobs), expected, atol=2e-4, rtol=0)


def test_states_count_in_the_memory_of_the_cache_and_go_with_it(folders: dict[str, Path]) -> None:
    worker = worker_of(folders["qwen3_5_text"])
    cache = worker._serving_cache()
    # three layers: 4 columns of 128 channels, and 4 heads of 16 x 16, for 3 rows and 3 prefixes
    assert cache.states.nbytes == 3 * 6 * 4 * (4 * 128 + 4 * 16 * 16)
    keys_and_values = sum(tensor.nbytes for tensor in (*cache.keys.values(), *cache.values.values()))
    assert worker.memory_bytes()["kv_cache"] == cache.nbytes == keys_and_values + 110592
    worker.to_cpu()
    assert worker.memory_bytes()["kv_cache"] == 0
    worker.to_device()
    requests = requests_of(prompts_of(40))
    check("qwen3_5_text", requests, run(worker, requests))


def test_a_deterministic_engine_gives_equal_bits_whatever_else_it_serves(folders: dict[str, Path]) -> None:
    for kind in ("qwen3_5_text", "falcon_h1"):
        prompts = prompts_of(30, 75, 1, 17)
        requests = requests_of([*prompts, prompts[0], prompts[1]], ignore_eos=True)
        crowd = run(worker_of(folders[kind], deterministic=True), requests)
        check(kind, requests, crowd)
        for request in requests:
            alone = run(worker_of(folders[kind], deterministic=True), [request], max_steps=2)[request.request_id]
            assert (alone.token_ids, alone.logprobs) == (
                crowd[request.request_id].token_ids,
                crowd[request.request_id].logprobs,
            )


def test_a_state_is_taken_put_copied_and_dropped_by_slot() -> None:
    key = ("conv_states", 0)
    states = SlotStates({0: {key: torch.zeros(1, 2)}}, num_slots=3)
    states.put(0, slice(1, 3), {key: torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    taken = states.take(0, slice(1, 2))
    taken[key] += 1  # in place, as modules change it
    states.put(0, slice(1, 2), taken)
    states.copy(1, 0)
    states.drop(2)
    assert states.take(0, slice(0, 3))[key].tolist() == [[2.0, 3.0], [2.0, 3.0], [0.0, 0.0]]
    assert states.nbytes == 24


def test_the_check_finds_states_that_siblings_or_turns_do_not_get(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = type(hybrid("lfm2"))
    assert refusal(cls, hybrid_config("lfm2")) is None
    monkeypatch.setattr(SlotStates, "copy", lambda states, source, target: None)
    found = refusal(cls, hybrid_config("lfm2", max_position_embeddings=511))
    assert found == "computes something else when it is served"


def test_transformers_itself_loads_the_tiny_models(folders: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["qwen3_5_text"])
    ids = torch.tensor([prompts_of(9)[0]])
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, hybrid("qwen3_5_text")(ids, use_cache=False).logits)
