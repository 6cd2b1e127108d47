"""Requests in vLLM's words, and the checks that inference backends share."""

from __future__ import annotations

from typing import Any

from rlite.backends.serving.sampler import RequestRules
from rlite.backends.vllm.release import SAMPLING, sampling_arguments
from rlite.types import GenerationHyperparameters, SequenceRequest


def request(output_ids: tuple[int, ...] = (), **gconfig: Any) -> SequenceRequest:
    return SequenceRequest(
        request_id=1,
        input_ids=[1, 2, 3],
        gconfig=GenerationHyperparameters(**gconfig),
        seed=2**63,
        output_ids=list(output_ids),
    )


def rules(max_model_len: int = 100, vocab_size: int = 50) -> RequestRules:
    return RequestRules("/nonexistent", vocab_size, max_model_len, frozenset({9}))


def asked_for(asking: SequenceRequest, max_model_len: int = 100) -> dict[str, Any]:
    return sampling_arguments(asking, rules().stop_ids(asking.gconfig), max_model_len)


def test_a_resumed_request_asks_for_what_is_left_and_keeps_its_seed_and_limits() -> None:
    whole = asked_for(request(max_new_tokens=20, min_new_tokens=4))
    rest = asked_for(request((5, 6), max_new_tokens=20, min_new_tokens=4))
    assert (whole["max_tokens"], rest["max_tokens"]) == (20, 18)
    assert whole["extra_args"] == rest["extra_args"]
    assert rest["extra_args"][SAMPLING]["min_length"] == 7
    assert asked_for(request(max_new_tokens=200))["max_tokens"] == 97


def test_end_tokens_are_stop_tokens_unless_they_are_ignored() -> None:
    asked = asked_for(request(stop_token_ids=[4]))
    assert (asked["stop_token_ids"], asked["ignore_eos"]) == ([4, 9], True)
    ignoring = asked_for(request(stop_token_ids=[4], ignore_eos=True))
    assert ignoring["stop_token_ids"] == [4]


def test_defaults_are_rlite_s_and_greedy_is_temperature_zero() -> None:
    asked = asked_for(request(), 10**6)
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["max_tokens"]) == (1.0, 1.0, 0, 16384)
    assert asked_for(request(temperature=0))["temperature"] == 0.0
    assert asked_for(request(top_k=-1))["top_k"] == 0


def test_objections_name_what_is_wrong() -> None:
    assert rules().objection(request()) is None, "only stop strings need a tokenizer"
    assert "max_model_len=3" in (rules(max_model_len=3).objection(request()) or "")
    assert "token id 3 is not in the vocabulary of 3" in (rules(vocab_size=3).objection(request()) or "")
    assert "/nonexistent" in (rules().objection(request(stop=["a"])) or "")
