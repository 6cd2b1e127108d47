"""Completions of several prompts, with an echo and the most likely tokens: what is read, refused and shown."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlite.rollout.openai import AgentSession
from rlite.services.endpoint.dialects.openai import read_completion, scored_logprobs
from rlite.services.endpoint.exchange import Exchange
from rlite.services.endpoint.recording import Turn
from rlite.services.endpoint.requests import ApiError
from rlite.types import GenerationHyperparameters, PromptLogprobs
from tests.agents import Speaker, tokenizer_with

TOKENIZER = tokenizer_with()


def complete(session: AgentSession, **body: Any) -> dict[str, Any]:
    async def answer() -> dict[str, Any]:
        [message] = [part async for part in session.completion({"model": "policy", **body}).messages]
        return message

    return asyncio.run(answer())


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt() -> None:
    engine = Speaker(["a", "b", "c", "d"], TOKENIZER)
    prompts = ["first", [72, 73]]
    response = complete(AgentSession(engine, TOKENIZER), prompt=prompts, n=2, echo=True)
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in response["choices"]] == ["firsta", "firstb", "ijc", "ijd"]
    assert [asked for asked, _ in engine.asked] == [TOKENIZER("first")["input_ids"]] * 2 + [[72, 73]] * 2
    assert response["usage"] == {"prompt_tokens": 7, "completion_tokens": 8, "total_tokens": 15}


def test_a_prompt_gets_the_same_seeds_in_a_list_and_alone() -> None:
    engine = Speaker(["x"], TOKENIZER)
    session = AgentSession(engine, TOKENIZER)
    complete(session, prompt=["a", "b"], n=2, seed=5)
    complete(session, prompt="b", n=2, seed=5)
    seeds = [request.gconfig.seed for request in engine.requests]
    assert seeds[:2] == seeds[2:4] == seeds[4:]
    assert len(set(seeds)) == 2


def test_an_echoed_text_is_not_read_as_the_continuation_of_an_earlier_answer() -> None:
    session = AgentSession(Speaker(["one"], TOKENIZER), TOKENIZER)
    complete(session, prompt="say: ")
    complete(session, prompt="say: one, more", echo=True)
    complete(session, prompt="say: one, more")
    first, echoed, other = session.recording.turns
    assert (echoed.parent, other.parent) == (None, first)


def test_only_a_prompt_that_is_alone_is_searched_for_earlier_turns() -> None:
    session = AgentSession(Speaker(["one"], TOKENIZER), TOKENIZER)
    complete(session, prompt="say: ")
    [first] = session.recording.turns
    for prompt in ("say: one, more", [*first.sequence, 72]):
        complete(session, prompt=prompt)
        assert session.recording.turns[-1].parent is first
        complete(session, prompt=[prompt, prompt])
        assert [turn.parent for turn in session.recording.turns[-2:]] == [None, None]


def test_a_session_that_does_not_record_keeps_no_turns() -> None:
    session = AgentSession(Speaker(["one"], TOKENIZER), TOKENIZER, is_recording=False)
    assert complete(session, prompt="say: ")["choices"][0]["text"] == "one"
    assert session.recording.turns == []


def test_offsets_of_a_streams_tokens_are_those_of_the_whole_answer() -> None:
    async def logprobs(is_stream: bool) -> list[dict[str, Any]]:
        session = AgentSession(Speaker(["four plus five"], TOKENIZER), TOKENIZER)
        body = {"model": "policy", "prompt": ["?", "!"], "logprobs": 0, "stream": is_stream}
        choices = [choice async for part in session.completion(body).messages for choice in part["choices"]]
        return [choice["logprobs"] for choice in choices if choice["index"] == 1 and choice["logprobs"]]

    [whole], parts = asyncio.run(logprobs(False)), asyncio.run(logprobs(True))
    assert len(parts) > 1
    for key in ("tokens", "text_offset"):
        assert [value for part in parts for value in part[key]] == whole[key]


REFUSED = [
    ({"prompt": []}, "prompt", "none empty"),
    ({"prompt": [[]]}, "prompt", "none empty"),
    ({"prompt": ["a", ""]}, "prompt", "none empty"),
    ({"prompt": [[1], [True]]}, "prompt", "none empty"),
    ({"prompt": [1, "a"]}, "prompt", "none empty"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
    ({"prompt": ["a"] * 9, "n": 128}, "n", "at most 1024 choices, and there are 9 prompts"),
    ({"prompt": "a", "echo": 1}, "echo", "true or false"),
    ({"prompt": "a", "logprobs": 6}, "logprobs", "an integer from 0 to 5"),
    ({"prompt": "a", "echo": True, "stream": True}, "stream", "for a request with echo or logprobs"),
    ({"prompt": "a", "logprobs": 1, "stream": True}, "stream", "for a request with echo or logprobs"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1; or 0 with echo=true and logprobs"),
    ({"prompt": "a", "max_tokens": 0, "logprobs": 1}, "max_tokens", "at least 1; or 0 with echo=true and logprobs"),
    ({"prompt": "a", "max_tokens": 0, "echo": True}, "max_tokens", "at least 1; or 0 with echo=true and logprobs"),
    (
        {"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 1, "stream": True},
        "stream",
        "for a request with echo",
    ),
    ({"prompt": "a", "max_tokens": -1, "echo": True, "logprobs": 1}, "max_tokens", "at least 1"),
    ({"prompt": "a", "logprobs": 1}, "logprobs", "this engine has no log-probabilities of prompts"),
    ({"prompt": "a", "logprobs": 0, "echo": True}, "logprobs", "this engine has no log-probabilities of prompts"),
]


@pytest.mark.parametrize(("change", "param", "message"), REFUSED, ids=[str(case[0])[:40] for case in REFUSED])
def test_unsupported_parameters_are_refused_by_name(change: dict[str, Any], param: str, message: str) -> None:
    session = AgentSession(Speaker(["x"], TOKENIZER), TOKENIZER)
    with pytest.raises(ApiError) as refusal:
        session.completion({"model": "policy", **change})
    assert (refusal.value.status, refusal.value.param) == (400, param)
    assert message in str(refusal.value)


@pytest.mark.parametrize("prompt", [[5.5] * 1_000_000, [[None]] * 1_000_000, ["a"] * 1_000_000, [[[1]] * 1_000_000]])
def test_a_hostile_prompt_is_refused_at_its_first_error(prompt: Any) -> None:
    started = time.process_time()
    with pytest.raises(ApiError) as refusal:
        read_completion({"model": "policy", "prompt": prompt}, "policy", GenerationHyperparameters())
    assert len(str(refusal.value)) < 5000
    assert time.process_time() - started < 30


prompts = st.text(max_size=3) | st.lists(st.integers(0, 300) | st.text(max_size=2) | st.lists(st.integers(0, 300)))


@settings(max_examples=100)
@given(prompt=prompts, echo=st.booleans() | st.none(), logprobs=st.integers(-1, 7) | st.none(), n=st.integers(0, 3))
def test_any_completion_is_read_or_refused(prompt: Any, echo: Any, logprobs: Any, n: int) -> None:
    body = {"model": "policy", "prompt": prompt, "echo": echo, "logprobs": logprobs, "n": n}
    with contextlib.suppress(ApiError):  # any other error is a failure
        request = read_completion(body, "policy", GenerationHyperparameters())
        assert all(request.prompts)
        assert request.needs_scores == (logprobs is not None and bool(logprobs or echo))


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("num_scored", [3, 2])
def test_most_likely_tokens_stand_at_their_tokens_and_the_token_itself_among_them(echo: bool, num_scored: int) -> None:
    a, b, c, d = (TOKENIZER(letter)["input_ids"][0] for letter in "abcd")
    half, other_half = (TOKENIZER(letter)["input_ids"][0] for letter in "éñ")  # both are shown as U+FFFD
    body = {"model": "policy", "prompt": [a, b], "logprobs": 2, "echo": echo}
    request = read_completion(body, "policy", GenerationHyperparameters())
    exchange = Exchange(request=request, prompts=[], model="policy", tokenizer=TOKENIZER, id="1")
    turn = Turn(id="1", prompt_ids=[a, b], output_ids=[c, d], logprobs=[-1.0, -0.25])
    scored = PromptLogprobs(
        logprobs=[-3.0, -1.1, -0.26][:num_scored],
        top_ids=[[half, other_half], [c, a], [d, a]][:num_scored],
        top_logprobs=[[-0.5, -0.75], [-1.1, -1.5], [-0.26, -4.0]][:num_scored],
    )
    shown = scored_logprobs(exchange, turn, scored)
    last = {"d": -0.26, "a": -4.0} if num_scored == 3 else {"d": -0.25}
    top = [None, {"\ufffd": -0.5, "b": -3.0}, {"c": -1.1, "a": -1.5}, last]
    first = 0 if echo else 2
    assert shown["tokens"] == ["a", "b", "c", "d"][first:]
    assert shown["token_logprobs"] == [None, -3.0, -1.0, -0.25][first:]
    assert shown["top_logprobs"] == top[first:]
    assert shown["text_offset"] == list(range(4 - first))
