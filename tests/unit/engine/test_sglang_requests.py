"""Requests in SGLang's names, and events of its token streams."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from rlite.backends.serving.sampler import objection
from rlite.backends.sglang.client import MAX_KEPT, TokenStream, generate_body
from rlite.data.routing import ROUTED, RoutingShape, RoutingTable
from rlite.types import MAX_KEPT_IDS, GenerationHyperparameters, SequenceRequest


def request_of(output_ids: tuple[int, ...] = (), extras: tuple[str, ...] = (), **gconfig: Any) -> SequenceRequest:
    return SequenceRequest(
        request_id=7,
        input_ids=[1, 2, 3],
        gconfig=GenerationHyperparameters(**{"max_new_tokens": 20, **gconfig}),
        seed=2**63 + 5,
        output_ids=list(output_ids),
        extras=extras,
    )


def event(total: int, tokens: list[int], reason: dict[str, Any] | None = None, **meta: Any) -> str:
    pairs = [[-0.5, token, None] for token in tokens]
    content = {"finish_reason": reason, "completion_tokens": total, "output_token_logprobs": pairs, **meta}
    return json.dumps({"output_ids": tokens, "meta_info": {"weight_version": "4", **content}})


def tokens_of(stream: TokenStream, *lines: str) -> list[list[int]]:
    return [stream.chunk(line, 0).token_ids for line in lines]


def test_lengths_count_from_the_beginning_of_the_completion_and_end_with_the_context() -> None:
    body = generate_body(request_of((8, 9), min_new_tokens=5), "name", 512, 100)
    assert body["input_ids"] == [1, 2, 3, 8, 9]
    assert (body["sampling_params"]["max_new_tokens"], body["sampling_params"]["min_new_tokens"]) == (18, 3)
    assert generate_body(request_of(), "name", 10, 100)["sampling_params"]["max_new_tokens"] == 7
    assert objection(request_of(), 4, 100) is None
    assert "max_model_len=3 leaves room for 2" in str(objection(request_of(), 3, 100))


def test_seeds_fit_into_64_bits() -> None:
    assert generate_body(request_of(), "name", 512, 100)["sampling_params"]["sampling_seed"] == 5


@pytest.mark.parametrize(
    ("gconfig", "top_k", "is_masked"),
    [
        ({}, -1, False),
        ({"top_k": 5}, 5, True),
        ({"top_p": 0.5}, 100, True),
        ({"greedy": True, "top_k": 5, "top_p": 0.5}, -1, False),
    ],
)
def test_truncated_sampling_asks_for_a_mask_of_finite_size(
    gconfig: dict[str, Any], top_k: int, is_masked: bool
) -> None:
    body = generate_body(request_of(**gconfig), "name", 512, 100)
    assert (body["sampling_params"]["top_k"], "return_sampling_mask" in body) == (top_k, is_masked)


def test_a_mask_is_smaller_than_the_server_s_limit() -> None:
    body = generate_body(request_of(top_p=0.9), "name", 512, 150_000)
    assert body["sampling_params"]["top_k"] == MAX_KEPT < 4096


def test_cumulative_and_incremental_events_bring_each_token_once() -> None:
    cumulative = TokenStream(request_of(), [])
    assert tokens_of(cumulative, event(1, [5]), event(3, [5, 6, 7]), event(3, [5, 6, 7])) == [[5], [6, 7], []]
    incremental = TokenStream(request_of(), [])
    assert tokens_of(incremental, event(1, [5]), event(3, [6, 7]), event(4, [8])) == [[5], [6, 7], [8]]


def test_a_cumulative_event_may_hold_tokens_beyond_its_count() -> None:
    stream = TokenStream(request_of(), [])
    assert tokens_of(stream, event(1, [5, 6]), event(2, [5, 6])) == [[5], [6]]


def test_the_last_event_of_an_aborted_request_repeats_a_token_that_is_not_counted_twice() -> None:
    stream = TokenStream(request_of(), [])
    aborted = event(2, [6], {"type": "abort", "message": "Abort in waiting queue"})
    assert tokens_of(stream, event(2, [5, 6]), aborted) == [[5, 6], []]
    assert stream.is_finished


def test_stop_tokens_end_a_completion_though_sglang_ignores_them_together_with_end_tokens() -> None:
    stream = TokenStream(request_of((8,), ignore_eos=True, stop_token_ids=[6], min_new_tokens=3), [])
    early = stream.chunk(event(2, [6, 6]), 0)
    assert (early.token_ids, early.finish_reason) == ([6, 6], None)
    last = stream.chunk(event(5, [6, 9, 6]), 0)
    assert (last.token_ids, last.logprobs, last.finish_reason) == ([6], [-0.5], "stop")
    assert not stream.is_finished, "the server still generates"


def test_a_refusal_and_a_model_that_computes_nan_end_their_request() -> None:
    refused = TokenStream(request_of(), []).chunk(json.dumps({"error": {"message": "too long", "code": 400}}), 0)
    assert refused.error == "too long"
    reason = {"type": "abort", "message": "the mask is too large", "status_code": 400}
    assert TokenStream(request_of(), []).chunk(event(1, [5], reason), 0).error == "the mask is too large"
    broken = event(1, [5]).replace("-0.5", "null")
    assert TokenStream(request_of(), []).chunk(broken, 0).is_nonfinite


def test_versions_are_the_server_s_and_corrected_at_the_end() -> None:
    versions = [1, 4, 4, 4]
    stream = TokenStream(request_of((9,)), versions)
    assert stream.chunk(event(3, [5, 6, 7]), 0).version == 4
    assert stream.chunk(event(3, []).replace('"4"', '"default"'), 3).version == 3
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 4}]
    stream.chunk(event(4, [5, 6, 7, 8], {"type": "length", "length": 4}, weight_versions=spans), 0)
    stream.restamp()
    assert versions == [1, 3, 3, 4]


def test_kept_ids_are_at_most_so_many_and_empty_if_nothing_is_truncated() -> None:
    asked = generate_body(request_of(top_p=0.9, extras=("kept_ids",)), "name", 512, 150_000)
    assert asked["sampling_params"]["top_k"] == MAX_KEPT_IDS
    plain = request_of(extras=("kept_ids",))
    assert "return_sampling_mask" not in generate_body(plain, "name", 512, 150_000)
    assert TokenStream(plain, []).chunk(event(2, [5, 6]), 0).extras == {"kept_ids": [[], []]}


TABLE = RoutingTable(RoutingShape(num_layers=2, top_k=2, num_experts=8), layers=(1, 2), num_all=3)


def encoded(table: np.ndarray) -> str:
    return base64.b64encode(table.astype(np.int32).tobytes()).decode()


def test_the_experts_of_all_tokens_come_with_the_last_event() -> None:
    request = request_of((8,), extras=(ROUTED,))
    assert generate_body(request, "name", 512, 100)["return_routed_experts"] is True
    assert "return_routed_experts" not in generate_body(request_of(), "name", 512, 100)
    stream, end = TokenStream(request, [], routing=TABLE), {"type": "length", "length": 3}
    chosen = np.stack([np.random.default_rng(seed).permutation(8)[:2] for seed in range(18)]).reshape(6, 3, 2)
    first = stream.chunk(event(1, [5]), 0)
    last = stream.chunk(event(3, [6, 7], end, routed_experts=encoded(chosen)), 0)
    assert first.extras == {ROUTED: [[]]}
    assert [len(rows) for rows in last.extras[ROUTED]] == [5, 1]
    found = [list(row) for rows in last.extras[ROUTED] for row in rows]
    assert found == chosen[:, 1:].reshape(6, -1).tolist()
    assert TokenStream(request_of((8,), extras=(ROUTED,)), [], routing=TABLE).chunk(event(1, [5], end), 0).extras == {
        ROUTED: [[]]
    }


@pytest.mark.parametrize(
    "table", [np.zeros((4, 3, 3)), np.zeros((2, 3, 2)), np.zeros((4, 4, 2)), np.full((4, 3, 2), 8)]
)
def test_a_table_of_another_model_ends_its_request_alone(table: np.ndarray) -> None:
    stream = TokenStream(request_of((8,), extras=(ROUTED,)), [], routing=TABLE)
    chunk = stream.chunk(event(1, [5], {"type": "length"}, routed_experts=encoded(table)), 0)
    assert "the engine returned routed_experts" in str(chunk.error)
    assert stream.is_finished
