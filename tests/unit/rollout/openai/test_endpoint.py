"""The endpoint against those who send too much, too slowly, or leave too early."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from rlite.rollout.openai import Access, AgentClient, AgentEndpoint, AgentSession
from rlite.services.endpoint.connections import Listener, find_capacity
from rlite.services.endpoint.dialects.openai import CHAT, COMPLETION
from rlite.services.endpoint.exchange import Dialect, Reply
from rlite.services.endpoint.requests import ApiError
from tests.agents import ADD, WITH_TOOLS, Speaker, tokenizer_with

TOKENIZER = tokenizer_with()
FAILED = "the server failed with ZeroDivisionError; its log has the traceback"


class Slow:
    """A tokenizer that takes until it may end."""

    def __init__(self) -> None:
        self.has_begun, self.may_end, self.has_ended = threading.Event(), threading.Event(), False

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)

    def __call__(self, text: Any, **options: Any) -> Any:
        self.has_begun.set()
        self.may_end.wait(100)
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


def test_it_answers_in_an_event_loop_of_uvloop() -> None:
    async def use() -> None:
        session = AgentSession(Speaker(["yes"], TOKENIZER), TOKENIZER)
        async with served(session) as (access,), aiohttp.ClientSession() as client:
            assert (await asyncio.wait_for(post(client, access, saying(3)), 60))[0] == 200

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(use())


def test_other_episodes_are_answered_while_a_long_message_is_tokenised() -> None:
    async def use() -> None:
        slow = Slow()
        sessions = [AgentSession(Speaker(["yes"], TOKENIZER), tokenizer) for tokenizer in (slow, TOKENIZER)]
        async with served(*sessions) as (first, second), aiohttp.ClientSession() as client:
            long = asyncio.create_task(post(client, first, saying(100_000)))
            await asyncio.to_thread(slow.has_begun.wait, 100)
            for _ in range(5):
                assert (await post(client, second, saying(3)))[0] == 200
            assert not slow.has_ended
            slow.may_end.set()
            assert (await long)[1]["usage"]["prompt_tokens"] > 100_000

    asyncio.run(asyncio.wait_for(use(), 200))


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

    asyncio.run(asyncio.wait_for(use(), 200))


def test_both_interfaces_know_the_sessions_model_and_no_other() -> None:
    async def use() -> None:
        session = AgentSession(Speaker(["yes"], TOKENIZER), TOKENIZER)
        async with served(session) as (access,), AgentClient(session) as in_process:
            over_http = openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key)
            for client in (in_process, over_http):
                assert [model.id async for model in client.models.list()] == ["policy"]
                assert (await client.models.retrieve("policy")).owned_by == "rlite"
                with pytest.raises(openai.NotFoundError, match="'other' does not exist; there is 'policy'"):
                    await client.models.retrieve("other")
            await over_http.close()

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
            await session.answer(COMPLETION, b" " * 20_000_000)

    asyncio.run(asyncio.wait_for(use(), 200))


# -- connections -------------------------------------------------------------------------------------------------------

DRIVER = """
import asyncio, json, logging, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from rlite.rollout.openai import AgentEndpoint, AgentSession
from tests.agents import Speaker, tokenizer_with

async def main():
    tokenizer = tokenizer_with()
    session = AgentSession(Speaker(["yes"], tokenizer, latency=0.05), tokenizer)
    async with AgentEndpoint() as endpoint, endpoint.serving(session) as access:
        print(json.dumps([access.base_url, access.api_key]), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        open("/dev/null").close()
        print(json.dumps([len(session.recording.completed()), endpoint.dropped]), flush=True)

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def driver(soft: int, hard: int) -> AsyncIterator[tuple[Any, Any]]:
    """A program with an endpoint that may open so many files, and what it says last."""
    root = str(Path(__file__).parents[4])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", DRIVER, str(soft), str(hard)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        cwd=root,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    async def last() -> Any:
        process.stdin.close()
        return json.loads(await process.stdout.read())

    try:
        base_url, api_key = json.loads(await process.stdout.readline())
        yield Access(base_url, api_key, "policy"), last
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.nightly
@pytest.mark.slow
def test_connections_that_send_nothing_stop_nobody_and_are_counted() -> None:
    async def use() -> Any:
        async with driver(1024, 1024) as (access, last), contextlib.AsyncExitStack() as stack:
            host, port = access.base_url.removeprefix("http://").removesuffix("/v1").split(":")
            for number in range(1500):
                half_open = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
                if number % 2:
                    half_open.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            async with aiohttp.ClientSession() as client:
                answers = await asyncio.gather(*(post(client, access, saying(3)) for _ in range(20)))
            assert {status for status, _ in answers} == {200}
            return await last()

    num_completed, dropped = asyncio.run(asyncio.wait_for(use(), 200))
    assert num_completed == 20
    assert sum(dropped.values()) >= 500


@pytest.mark.nightly
@pytest.mark.slow
def test_a_thousand_agents_at_once_are_answered_with_1024_file_descriptors() -> None:
    async def agent(client: aiohttp.ClientSession, access: Any) -> list[int]:
        return [await ask(client, access) for _ in range(2)]

    num_repeated = 0

    async def ask(client: aiohttp.ClientSession, access: Any, retries: int = 2) -> int:
        nonlocal num_repeated
        try:
            return (await post(client, access, saying(3)))[0]
        except aiohttp.ClientConnectionError:  # dropped while this process, on a busy machine, said nothing for 5 s
            if not retries:
                raise
            num_repeated += 1
            return await ask(client, access, retries - 1)  # as clients of OpenAI do

    async def use() -> Any:
        find_capacity()  # this process needs a descriptor for each agent, too
        async with (
            driver(1024, 1024) as (access, last),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
        ):
            answers = await asyncio.gather(*(agent(client, access) for _ in range(1000)))
            assert answers == [[200, 200]] * 1000
            return await last()

    num_answers, dropped = asyncio.run(asyncio.wait_for(use(), 200))
    assert num_answers == 2000
    assert num_repeated <= sum(dropped.values()), "the endpoint counts every connection that it drops"


def test_too_few_file_descriptors_are_an_error_that_says_what_to_do() -> None:
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))\n"
    code += "from rlite.services.endpoint.connections import find_capacity\nprint(find_capacity())"
    run = partial(subprocess.run, capture_output=True, text=True, timeout=60)
    raised = run([sys.executable, "-c", code, "64", "1024"])
    assert 400 < int(raised.stdout) < 512, "the soft limit is raised to the hard one"
    refused = run([sys.executable, "-c", code, "64", "64"])
    assert "needs at least 64 free file descriptors; this process may open 64" in refused.stderr
    assert "ulimit -n 4096" in refused.stderr


def test_garbage_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def send_garbage(num_requests: int) -> Counter[str]:
        session = AgentSession(Speaker(["yes"], TOKENIZER), TOKENIZER)
        async with AgentEndpoint() as endpoint, endpoint.serving(session) as access:
            port = int(access.base_url.split(":")[2].partition("/")[0])
            for _ in range(num_requests):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET / HTTP/x\r\n\r\n")
                assert b" 400 " in await reader.read()
                writer.close()
            return endpoint.dropped

    dropped = asyncio.run(asyncio.wait_for(send_garbage(20), 200))
    assert list(dropped.values()) == [20]
    assert "cannot be read" in next(iter(dropped))
    assert len(caplog.records) == 1
    assert "Traceback" not in caplog.text


def test_connection_without_a_key_is_dropped_and_a_trusted_one_stays() -> None:
    async def use() -> None:
        dropped: Counter[str] = Counter()
        made: list[Any] = []

        def protocol() -> asyncio.Protocol:
            made.append(Remembering())
            return made[-1]

        listener = Listener(protocol, dropped, capacity=2, header_seconds=0.2)
        try:
            clients = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(2)]
            (silent, _), (trusted, _) = clients
            while len(made) < 2:
                await asyncio.sleep(0.001)
            with listener.busy(made[1].transport):
                assert await silent.read() == b""
                assert dict(dropped) == {"no request with a session's key in 0.2 s": 1}
                others = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(3)]
                for reader, _ in others:
                    with contextlib.suppress(ConnectionResetError):
                        assert await reader.read() == b""
                assert dict(dropped) == {"no request with a session's key in 0.2 s": 4}
                made[1].transport.write(b"still here")
                assert await trusted.read(10) == b"still here"
            made[1].transport.close()
        finally:
            await listener.close()

    asyncio.run(asyncio.wait_for(use(), 200))


def test_without_file_descriptors_the_event_loop_goes_on_and_later_the_client_is_taken() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hoard: list[int] = []

    def release() -> None:
        while hoard:
            os.close(hoard.pop())

    async def use() -> tuple[int, bytes]:
        listener = Listener(Remembering, Counter(), capacity=2, header_seconds=0.1)
        client = socket.socket()
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, max(map(int, os.listdir("/dev/fd"))) + 50), hard))
        with contextlib.suppress(OSError):
            while True:
                hoard.append(os.dup(client.fileno()))
        timer = threading.Timer(1.0, release)  # a frozen event loop would release none
        timer.start()
        client.connect(("127.0.0.1", listener.port))
        num_turns = 0
        while hoard:
            await asyncio.sleep(0.01)
            num_turns += 1
        try:
            return num_turns, await asyncio.to_thread(client.recv, 1)
        finally:
            client.close()
            await listener.close()

    try:
        num_turns, end = asyncio.run(asyncio.wait_for(use(), 100))
    finally:
        release()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert num_turns >= 10
    assert end == b"", "the client was taken, and dropped because it sent no key"


class Remembering(asyncio.Protocol):
    """Knows its transport."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport


# -- delivery ----------------------------------------------------------------------------------------------------------


def leave(client: socket.socket, end: str) -> None:
    """Close a connection. If the client has read everything so far, the server sees an end and no reset."""
    client.settimeout(0.05)
    with contextlib.suppress(TimeoutError):
        while end == "reads and leaves":
            client.recv(100_000)
    client.close()
    time.sleep(0.05)  # a busy kernel delivers the end later


class Watched:
    """A tokenizer that calls a function when a response's last token is put into words."""

    def __init__(self) -> None:
        self.on_last: Any = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)

    def __call__(self, text: Any, **options: Any) -> Any:
        return TOKENIZER(text, **options)

    def decode(self, tokens: Any, **options: Any) -> Any:
        if tokens == [TOKENIZER.eos_token_id] and not options:
            self.on_last()
        return TOKENIZER.decode(tokens, **options)


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("end", ["stays", "leaves", "reads and leaves"])
def test_an_answer_counts_if_its_end_was_sent_while_the_client_was_there(is_stream: bool, end: str) -> None:
    has_left = end != "stays"

    async def use() -> AgentSession:
        tokenizer = Watched()
        session = AgentSession(Speaker(["four"], TOKENIZER), tokenizer)
        async with served(session) as (access,):
            host, port = access.base_url.removeprefix("http://").removesuffix("/v1").split(":")
            with socket.create_connection((host, int(port))) as client:
                tokenizer.on_last = partial(leave, client, end) if has_left else lambda: None
                body = json.dumps({**json.loads(saying(3)), "stream": is_stream, "logprobs": True}).encode()
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Api-Key: {access.api_key}\r\n"
                client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                answer = b""
                while not has_left and not answer.endswith(b"0\r\n\r\n" if is_stream else b"}"):
                    answer += await asyncio.to_thread(client.recv, 10_000)
                while has_left and client.fileno() >= 0:
                    await asyncio.sleep(0.001)
        return session

    session = asyncio.run(asyncio.wait_for(use(), 200))
    assert [turn.is_aborted for turn in session.recording.turns] == [has_left]


class Breaking(Speaker):
    """Breaks after its first token."""

    async def stream(self, request: Any) -> AsyncIterator[Any]:
        async for chunk in super().stream(request):
            yield dataclasses.replace(chunk, token_ids=chunk.token_ids[:1], logprobs=chunk.logprobs[:1])
            raise ZeroDivisionError("broken")


def test_a_stream_that_breaks_ends_with_an_event_and_no_second_response(caplog: pytest.LogCaptureFixture) -> None:
    async def use() -> tuple[int, str]:
        session = AgentSession(Breaking(["yes"], TOKENIZER), TOKENIZER)
        async with served(session) as (access,), aiohttp.ClientSession() as client:
            headers = {"Authorization": f"Bearer {access.api_key}"}
            body = {**json.loads(saying(3)), "stream": True}
            async with client.post(access.base_url + "/chat/completions", json=body, headers=headers) as response:
                text = await response.text()
            assert [turn.is_aborted for turn in session.recording.turns] == [True]
            return response.status, text

    status, text = asyncio.run(asyncio.wait_for(use(), 100))
    *_, failure, end = text.split("\n\n")
    assert (status, end) == (200, "")
    assert '"role": "assistant"' in text
    assert json.loads(failure.removeprefix("data: "))["error"]["message"] == FAILED
    assert "failed in the middle of its stream" in caplog.text


def test_an_answer_that_fails_after_it_was_sent_breaks_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Reply):
        async def encoded(self) -> AsyncGenerator[bytes, None]:
            async for part in super().encoded():
                yield part + b" " * 1000
            raise ZeroDivisionError("broken")

    async def use() -> None:
        session = AgentSession(Speaker(["yes"], TOKENIZER), TOKENIZER)
        answer = session.answer

        async def failing(dialect: Dialect, body: bytes) -> Reply:
            reply = await answer(dialect, body)
            return Failing(reply.dialect, reply.exchange, reply.messages)

        monkeypatch.setattr(session, "answer", failing)
        async with served(session) as (access,):
            host, port = access.base_url.removeprefix("http://").removesuffix("/v1").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            body = saying(3)
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {access.api_key}\r\n"
            )
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answered = b""
            with contextlib.suppress(ConnectionResetError):
                while part := await reader.read(10_000):
                    answered += part
            assert answered.count(b"HTTP/1.1") == 1
            writer.close()

    asyncio.run(asyncio.wait_for(use(), 100))


# -- bodies ------------------------------------------------------------------------------------------------------------


DEEP = "[" * 900 + "1" + "]" * 900
DEEP_SCHEMA = '{"type": "object", "properties": {"a": ' * 450 + "{}" + "}}" * 450
FUNCTIONS = [
    f'{{"name": "f", "parameters": {DEEP_SCHEMA}}}',
    f'{{"name": "f", "parameters": {{"default": {DEEP}}}}}',
    '{"name": "f", "parameters": "a text"}',
    '{"name": "f", "parameters": {"properties": [1]}}',
    '{"name": "f", "parameters": {"properties": {"a": 5}}}',
    '{"name": "f", "parameters": {"type": "thing"}}',
    '{"name": "f", "parameters": {"type": ["object", {}]}}',
    '{"name": "f", "parameters": {"required": "a"}}',
    '{"name": "f", "description": {}}',
    '{"name": ""}',
]
CHANGES = [
    *(f'"tools": [{{"type": "function", "function": {function}}}]' for function in FUNCTIONS),
    *(f'"{key}": {DEEP}' for key in ("temperature", "response_format", "messages", "metadata", "stop")),
]
LOOKING = WITH_TOOLS.replace("{{ tool | tojson }}", "{{ tool.function.parameters.properties.items() | list }}")


@pytest.mark.parametrize("template", [WITH_TOOLS, LOOKING, "{{ messages[0].content[0] ** 99999 }}", "{{ [][5].a.b }}"])
def test_no_request_makes_a_server_error(template: str) -> None:
    tokenizer = tokenizer_with(template)
    bodies = [saying(3)[:-1] + f", {change}}}".encode() for change in CHANGES]

    async def use() -> None:
        session = AgentSession(Speaker(["yes"], tokenizer), tokenizer)
        async with served(session) as (access,), aiohttp.ClientSession() as client:
            for body in bodies:
                status, answer = await post(client, access, body)
                assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), answer
            headers = {"Authorization": f"Bearer {access.api_key}", "Content-Encoding": "gzip"}
            async with client.post(f"{access.base_url}/completions", data=b"no gzip", headers=headers) as response:
                assert response.status == 400

    asyncio.run(asyncio.wait_for(use(), 200))


@settings(max_examples=150)
@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=3)), min_size=1, max_size=5))
def test_damaged_bodies_are_answered_or_refused(changes: list[tuple[int, bytes]]) -> None:
    body = bytearray(json.dumps({**json.loads(saying(3)), "tools": [ADD], "max_tokens": 5, "stop": ["a"]}).encode())
    for place, new in changes:
        body[place % len(body) : place % len(body) + 1] = new
    tokenizer = tokenizer_with(WITH_TOOLS)

    async def answer() -> None:
        reply = await AgentSession(Speaker(["yes"], tokenizer), tokenizer).answer(CHAT, bytes(body))
        assert [message async for message in reply.messages]

    try:
        asyncio.run(answer())
    except ApiError as error:
        assert 400 <= error.status < 500  # noqa: PT017  # either of two
