"""Requests in vLLM's words, and tokens on their way to the driver."""

from __future__ import annotations

from typing import Any

from rlite.backends.vllm.requests import SAMPLING, objection, sampling_arguments
from rlite.backends.vllm.step_batching import TokenStep, chunks_of
from rlite.types import GenerationHyperparameters, SequenceRequest, TokenChunk


def request(output_ids: tuple[int, ...] = (), **gconfig: Any) -> SequenceRequest:
    return SequenceRequest(
        request_id=1,
        input_ids=[1, 2, 3],
        gconfig=GenerationHyperparameters(**gconfig),
        seed=2**63,
        output_ids=list(output_ids),
    )


def test_a_resumed_request_asks_for_what_is_left_and_keeps_its_seed_and_limits() -> None:
    whole = sampling_arguments(request(max_new_tokens=20, min_new_tokens=4), frozenset({9}), 100)
    rest = sampling_arguments(request((5, 6), max_new_tokens=20, min_new_tokens=4), frozenset({9}), 100)
    assert (whole["max_tokens"], rest["max_tokens"]) == (20, 18)
    assert whole["extra_args"] == rest["extra_args"]
    assert rest["extra_args"][SAMPLING]["min_length"] == 7
    assert sampling_arguments(request(max_new_tokens=200), frozenset(), 100)["max_tokens"] == 97


def test_end_tokens_are_stop_tokens_unless_they_are_ignored() -> None:
    asked = sampling_arguments(request(stop_token_ids=[4]), frozenset({9}), 100)
    assert (asked["stop_token_ids"], asked["ignore_eos"]) == ([4, 9], True)
    ignoring = sampling_arguments(request(stop_token_ids=[4], ignore_eos=True), frozenset({9}), 100)
    assert ignoring["stop_token_ids"] == [4]


def test_defaults_are_rlite_s_and_greedy_is_temperature_zero() -> None:
    asked = sampling_arguments(request(), frozenset(), 10**6)
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["max_tokens"]) == (1.0, 1.0, 0, 16384)
    assert sampling_arguments(request(temperature=0), frozenset(), 100)["temperature"] == 0.0
    assert sampling_arguments(request(top_k=-1), frozenset(), 100)["top_k"] == 0


def test_objections_name_what_is_wrong() -> None:
    assert objection(request(), 100, 50, None) is None
    assert "max_model_len=3" in (objection(request(), 3, 50, None) or "")
    assert "token id 3 is not in the vocabulary of 3" in (objection(request(), 100, 3, None) or "")
    assert objection(request(), 100, 50, "no file") is None, "only stop strings need a tokenizer"
    assert "no file" in (objection(request(stop=["a"]), 100, 50, "no file") or "")


def test_steps_become_a_chunk_for_each_request_and_version() -> None:
    def step(version: int, *runs: tuple[int, *tuple[int, ...]], last: tuple[TokenChunk, ...] = ()) -> TokenStep:
        return TokenStep(
            version=version,
            request_ids=[number for number, *_ in runs],
            counts=[len(tokens) for _, *tokens in runs],
            token_ids=[token for _, *tokens in runs for token in tokens],
            logprobs=[-1.0 * token for _, *tokens in runs for token in tokens],
            sampling_logprobs=[0.0 for _, *tokens in runs for _ in tokens],
            last=list(last),
        )

    refused = TokenChunk(request_id=3, version=0, error="too long")
    stopped = TokenChunk(request_id=1, version=1, finish_reason="stop")
    made = chunks_of([step(0, (1, 1, 4), (2, 5)), step(0, (1, 2), last=(refused,)), step(1, (1, 3), last=(stopped,))])
    assert [(c.request_id, c.token_ids, c.version, c.finish_reason, c.error) for c in made] == [
        (1, [1, 4, 2], 0, None, None),
        (2, [5], 0, None, None),
        (3, [], 0, None, "too long"),
        (1, [3], 1, "stop", None),
    ]
    assert made[0].logprobs == [-1.0, -4.0, -2.0]
    assert made[3].sampling_logprobs == [0.0]
