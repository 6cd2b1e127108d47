"""Log-probabilities of prompts: how much one request may want, and that others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from rlite.rollout.draws import Draws
from rlite.rollout.episode import Episode, SampleInference
from rlite.rollout.openai import AgentSession
from rlite.services.endpoint.dialects.openai import COMPLETION
from rlite.services.endpoint.exchange import Exchange, Reply
from rlite.services.endpoint.prompts import SLICE_TOKENS, Prompt
from rlite.services.endpoint.requests import ApiError
from rlite.types import GenerationHyperparameters, PromptLogprobs
from tests.agents import Speaker, tokenizer_with

TOKENIZER = tokenizer_with()
LIKELY = [65, 66, 67, 68, 69]
BATCH = {"model": "policy", "prompt": [[70] * 500] * 40, "max_tokens": 1, "echo": True, "logprobs": 5}


class Scoring(Speaker):
    """Speaker with log-probabilities of prompts; a prompt's are its length. `scored` has the prompts of each call."""

    def __init__(self, is_stuck: bool = False) -> None:
        super().__init__(["x"], TOKENIZER)
        self.scored: list[list[list[int]]] = []
        self.is_scoring, self.may_score = asyncio.Event(), asyncio.Event()
        if not is_stuck:
            self.may_score.set()

    async def ascore(self, prompts: Sequence[list[int]], num_top: int = 1) -> list[PromptLogprobs]:
        self.scored.append(list(prompts))
        self.is_scoring.set()
        await self.may_score.wait()
        return [
            PromptLogprobs(
                logprobs=[-float(len(ids))] * (len(ids) - 1),
                top_ids=[LIKELY[:num_top]] * (len(ids) - 1),
                top_logprobs=[[-1.0] * num_top] * (len(ids) - 1),
            )
            for ids in prompts
        ]


class Counting:
    """A tokenizer that notes which tokens are shown, and in which threads."""

    def __init__(self) -> None:
        self.shown: Counter[int] = Counter()
        self.threads: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)

    def decode(self, ids: list[int], **options: Any) -> str:
        if not options and len(ids) == 1:
            self.shown[ids[0]] += 1
            self.threads.add(threading.get_ident())
        return TOKENIZER.decode(ids, **options)


@pytest.mark.parametrize("is_of_an_episode", [False, True])
def test_a_request_for_too_many_scores_is_refused_before_it_generates(is_of_an_episode: bool) -> None:
    engine = Scoring()
    of_episode = SampleInference(engine, Episode(0.0), Draws())
    session = AgentSession(of_episode if is_of_an_episode else engine, TOKENIZER)
    many = {"prompt": [[70] * 4000] * 8, "n": 128, "max_tokens": 1}
    with pytest.raises(ApiError, match=r"1024 choices may have 4097024 tokens.*at most 131072") as refusal:
        session.completion({**BATCH, **many})
    assert (refusal.value.status, refusal.value.param) == (400, "logprobs")
    with pytest.raises(ApiError, match="max_tokens lower"):
        session.completion({**BATCH, "max_tokens": 8192})
    assert engine.asked == engine.scored == []


def test_the_limit_of_the_context_bounds_the_scores_of_an_answer() -> None:
    session = AgentSession(Scoring(), TOKENIZER, max_length=2048)
    session.completion({**BATCH, "max_tokens": 8192})


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_an_echo_without_new_tokens_scores_the_prompts_and_generates_nothing(limit: str) -> None:
    engine = Scoring()
    session = AgentSession(engine, TOKENIZER, {"temperature": 0.5, "min_new_tokens": 2}, max_length=4)
    body = {"model": "policy", "prompt": [[70, 71, 72], [70]], "echo": True, "logprobs": 1, limit: 0}

    async def answer() -> Any:
        [response] = [message async for message in session.completion(body).messages]
        return response

    response = asyncio.run(answer())
    first, second = response["choices"]
    assert (first["text"], first["finish_reason"]) == ("ghi", "length")
    assert first["logprobs"] == {
        "tokens": ["g", "h", "i"],
        "token_logprobs": [None, -3.0, -3.0],
        "top_logprobs": [None, {"b": -1.0, "h": -3.0}, {"b": -1.0, "i": -3.0}],
        "text_offset": [0, 1, 2],
    }
    assert (second["text"], second["logprobs"]["token_logprobs"]) == ("g", [None])
    assert response["usage"] == {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4}
    assert engine.scored == [[[70, 71, 72], [70]]]
    assert engine.asked == session.recording.turns == []
    with pytest.raises(ApiError, match="the prompt has 4 tokens; at most 3 are scored"):
        session.completion({**body, "prompt": [70] * 4})


def test_a_batch_is_scored_in_slices_and_shown_beside_the_loop_with_each_token_decoded_once() -> None:
    engine, tokenizer = Scoring(), Counting()
    session = AgentSession(engine, tokenizer)  # type: ignore[arg-type]
    lengths = [400 + 5 * number for number in range(40)]

    async def answer() -> Any:
        body = {**BATCH, "prompt": [[70] * length for length in lengths]}
        [part] = [part async for part in session.completion(body).encoded()]
        return json.loads(part)

    shown = [choice["logprobs"] for choice in asyncio.run(answer())["choices"]]
    assert [len(choice["tokens"]) for choice in shown] == [length + 1 for length in lengths]
    assert [choice["token_logprobs"][1] for choice in shown] == [-(length + 1.0) for length in lengths]
    assert len(engine.scored) == 2
    assert all(sum(map(len, prompts)) <= SLICE_TOKENS for prompts in engine.scored)
    answers = {output[0] for _, output in engine.asked}
    assert tokenizer.shown == dict.fromkeys({70, *LIKELY, *answers}, 1)
    assert threading.get_ident() not in tokenizer.threads


def test_a_long_response_is_encoded_beside_the_loop() -> None:
    choice = {"logprobs": {"tokens": ["a"] * 5000}}
    message = {"choices": [choice], "usage": {"total_tokens": 5000}}
    ids = [1] * 5000
    request = COMPLETION.read({"model": "policy", "prompt": ids, "logprobs": 0}, "policy", GenerationHyperparameters())
    prompts = [Prompt(ids, "", None)]
    exchange = Exchange(request=request, prompts=prompts, model="policy", tokenizer=TOKENIZER, id="1")

    async def messages() -> Any:
        yield message

    async def encoded() -> tuple[bytes, bool]:
        parts = Reply(COMPLETION, exchange, messages()).encoded()
        other = asyncio.create_task(asyncio.sleep(0))
        part = await anext(parts)
        await parts.aclose()
        return part, other.done()

    part, has_other_run = asyncio.run(encoded())
    assert json.loads(part) == message
    assert has_other_run


@pytest.mark.parametrize("is_client_leaving", [True, False])
def test_nothing_more_is_scored_for_a_client_that_left_or_a_session_that_ended(is_client_leaving: bool) -> None:
    async def scored() -> int:
        engine = Scoring(is_stuck=True)
        session = AgentSession(engine, TOKENIZER)
        asking = asyncio.ensure_future(anext(session.completion(BATCH).messages))
        await asyncio.wait_for(engine.is_scoring.wait(), 60)
        if is_client_leaving:
            asking.cancel()
        else:
            await session.close()
        engine.may_score.set()
        with contextlib.suppress(asyncio.CancelledError), pytest.raises(ApiError, match="session has ended"):
            await asking
        assert all(turn.is_aborted for turn in session.recording.turns)
        return sum(len(ids) for prompts in engine.scored for ids in prompts)

    assert 0 < asyncio.run(scored()) <= SLICE_TOKENS
