"""The endpoint against those who send too much, too slowly, or leave too early."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from rlite.rollout.openai import AgentClient, AgentEndpoint, AgentSession
from rlite.rollout.openai.errors import ApiError
from tests.agents import Speaker, tokenizer_with

TOKENIZER = tokenizer_with()


class Slow:
    """A tokenizer that takes until it may end."""

    def __init__(self) -> None:
        self.has_begun, self.may_end, self.has_ended = threading.Event(), threading.Event(), False

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)

    def __call__(self, text: Any, **options: Any) -> Any:
        self.has_begun.set()
        self.may_end.wait(10)
        self.has_ended = True
        return TOKENIZER(text, **options)


@contextlib.asynccontextmanager
async def served(*sessions: AgentSession) -> AsyncIterator[list[Any]]:
    async with AgentEndpoint() as endpoint, contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(endpoint.serving(session)) for session in sessions]


def saying(length: int) -> bytes:
    return json.dumps({"model": "policy", "messages": [{"role": "user", "content": "x" * length}]}).encode()


async def post(client: aiohttp.ClientSession, access: Any, body: bytes) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {access.api_key}"}
    async with client.post(access.base_url + "/chat/completions", data=body, headers=headers) as response:
        return response.status, await response.json()


def test_other_episodes_are_answered_while_a_long_message_is_tokenised() -> None:
    async def use() -> None:
        slow = Slow()
        sessions = [AgentSession(Speaker(["yes"], TOKENIZER), tokenizer) for tokenizer in (slow, TOKENIZER)]
        async with served(*sessions) as (first, second), aiohttp.ClientSession() as client:
            long = asyncio.create_task(post(client, first, saying(100_000)))
            await asyncio.to_thread(slow.has_begun.wait, 10)
            for _ in range(5):
                assert (await post(client, second, saying(3)))[0] == 200
            assert not slow.has_ended
            slow.may_end.set()
            assert (await long)[1]["usage"]["prompt_tokens"] > 100_000

    asyncio.run(asyncio.wait_for(use(), 100))


@pytest.mark.parametrize(("num_bytes", "status"), [(7_000_000, 400), (60_000_000, 413)])
def test_a_message_that_no_context_holds_is_refused_before_it_is_tokenised(num_bytes: int, status: int) -> None:
    async def use() -> None:
        engine = Speaker(["yes"], TOKENIZER)
        engine.context_length = 1024
        session = AgentSession(engine, TOKENIZER)
        async with served(session) as (access,), aiohttp.ClientSession() as client:
            for _ in range(3):
                got, body = await post(client, access, saying(num_bytes))
                assert (got, body["error"]["code"]) == (status, "context_length_exceeded")
        async with AgentClient(session) as in_process:
            with pytest.raises(openai.APIStatusError) as refusal:
                await in_process.completions.create(model="policy", prompt="x" * num_bytes)
            assert refusal.value.status_code == status
        assert session.recording.turns == []

    asyncio.run(asyncio.wait_for(use(), 20))


def test_a_body_whose_length_is_not_told_is_read_only_so_far() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 1_000_000

    async def use() -> None:
        engine = Speaker(["yes"], TOKENIZER)
        engine.context_length = 1024
        session = AgentSession(engine, TOKENIZER)
        async with served(session) as (access,), aiohttp.ClientSession() as client:
            assert (await post(client, access, pieces()))[0] == 413  # type: ignore[arg-type]
        with pytest.raises(ApiError, match="longer than 8388608 bytes"):
            await session.answer("/completions", b" " * 20_000_000)

    asyncio.run(asyncio.wait_for(use(), 20))
