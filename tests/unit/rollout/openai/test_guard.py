"""Attacks on a server: wrong tokens, foreign pages, too much of everything, and what it may tell."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlite.errors import ConfigError, WorkerError
from rlite.rollout.openai import Access, AgentEndpoint, AgentSession
from rlite.services.endpoint.dialects.table import DIALECTS
from rlite.services.endpoint.guard import TOKEN_VARIABLE, Limits, Names, find_token, is_loopback
from rlite.services.endpoint.requests import ApiError
from tests.agents import WITH_TOOLS, Speaker, tokenizer_with

TOKENIZER = tokenizer_with(WITH_TOOLS)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/inference/v1/generate": {"token_ids": [1]},
}
SECRET = "the launch code is 0000"


@contextlib.asynccontextmanager
async def served(
    engine: Speaker | None = None, limits: Limits | None = None, names: Names | None = None
) -> AsyncIterator[tuple[Access, aiohttp.ClientSession, AgentSession]]:
    session = AgentSession(engine or Speaker(["yes"], TOKENIZER), TOKENIZER)
    given: dict[str, Any] = {"limits": limits, "names": names}
    endpoint = AgentEndpoint(**{key: value for key, value in given.items() if value is not None})
    async with endpoint, endpoint.serving(session) as access, aiohttp.ClientSession(access.root) as client:
        yield access, client, session


async def ask(
    client: aiohttp.ClientSession, path: str, headers: dict[str, str], method: str = "POST", **change: Any
) -> tuple[int, Any]:
    body = {"model": "policy", **BODIES.get(path, {}), **change}
    options = {"json": body} if method == "POST" else {}
    async with client.request(method, path, headers=headers, **options) as response:
        return response.status, await response.json()


def run(use: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(use(), 250))


def test_every_route_but_health_needs_the_token_and_tells_so_in_its_form() -> None:
    async def use() -> None:
        async with served() as (access, client, session):
            key = access.api_key
            for path in [*DIALECTS, "/v1/models", "/v1/models/policy", "/", "/admin", "/../etc/passwd"]:
                method = "POST" if path in DIALECTS else "GET"
                basic = [{"Authorization": given} for given in ("Bearer wrong", key, f"Basic {key}", "Bearer", "")]
                for headers in (*basic, {}, {"X-Api-Key": key[:-1]}, {"X-Api-Key": ""}):
                    status, body = await ask(client, path, headers, method)
                    assert status == 401
                    assert ("type" in body) == path.startswith("/v1/messages")
            assert await ask(client, "/health", {}, "GET") == (200, {"status": "ok"})
            assert session.recording.turns == []

    run(use)


@pytest.mark.parametrize("header", ["Authorization", "X-Api-Key"])
def test_both_ways_to_send_the_token_open_every_route(header: str) -> None:
    async def use() -> None:
        async with served() as (access, client, _):
            headers = {header: f"Bearer {access.api_key}" if header == "Authorization" else access.api_key}
            for path in DIALECTS:
                assert (await ask(client, path, headers))[0] == 200
            assert (await ask(client, "/v1/models", headers, "GET"))[0] == 200
            assert (await ask(client, "/v1/nothing", headers, "GET"))[0] == 404

    run(use)


@pytest.mark.parametrize(
    "host", ["attacker.example", "attacker.example:80", "127.0.0.1.attacker.example", "10.0.0.1", ""]
)
def test_a_page_that_rebound_its_name_is_refused(host: str) -> None:
    async def use() -> None:
        async with served() as (access, client, session):
            key = {"Authorization": f"Bearer {access.api_key}"}
            for path in ("/v1/chat/completions", "/health"):
                status, body = await ask(client, path, {**key, "Host": host}, "GET" if path == "/health" else "POST")
                assert (status, body["error"]["code"]) == (403, "unknown_host")
            assert session.recording.turns == []

    run(use)


@pytest.mark.parametrize("origin", ["https://attacker.example", "null", "http://localhost:1", "file://"])
def test_a_page_of_another_origin_is_refused_and_gets_no_leave(origin: str) -> None:
    async def use() -> None:
        async with served() as (access, client, _):
            key = {"Authorization": f"Bearer {access.api_key}", "Origin": origin}
            assert (await ask(client, "/v1/chat/completions", key))[0] == 403
            async with client.options("/v1/chat/completions", headers=key) as response:
                assert response.status == 403
                assert not [name for name in response.headers if name.startswith("Access-Control")]

    run(use)


@pytest.mark.parametrize(
    ("host", "asked", "is_known"),
    [
        ("127.0.0.1", "localhost:8000", True),
        ("127.0.0.1", "[::1]:8000", True),
        ("127.0.0.1", "LOCALHOST", True),
        ("127.0.0.1", "192.168.0.7:8000", False),
        ("0.0.0.0", "192.168.0.7:8000", True),
        ("0.0.0.0", "[fe80::1]:8000", True),
        ("0.0.0.0", f"{socket.gethostname()}:8000", True),
        ("0.0.0.0", "proxy.example:8000", True),
        ("0.0.0.0", "attacker.example:8000", False),
    ],
)
def test_a_server_knows_its_own_names(host: str, asked: str, is_known: bool) -> None:
    names = Names(host, ["proxy.example"])
    with contextlib.nullcontext() if is_known else pytest.raises(ApiError):
        names.check({"Host": asked})
        names.check({"Host": asked, "Origin": f"http://{asked}"})


@pytest.mark.parametrize(
    ("host", "is_own"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_only_addresses_of_this_machine_are_loopback(host: str, is_own: bool) -> None:
    assert is_loopback(host) == is_own
    assert not is_loopback("example.org")


def test_requests_beyond_the_places_are_refused_with_429_and_a_time_to_wait() -> None:
    async def use() -> None:
        engine = Speaker(["yes"], TOKENIZER, latency=1.0)
        async with served(engine, Limits(running=1, waiting=1)) as (access, client, session):
            key = {"Authorization": f"Bearer {access.api_key}"}
            first = [asyncio.create_task(ask(client, "/v1/messages", key)) for _ in range(2)]
            while not engine.num_requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            async with client.post("/v1/messages", headers=key, data=b"{}") as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
                assert (await refused.json())["error"]["type"] == "rate_limit_error"
            assert [status for status, _ in await asyncio.gather(*first)] == [200, 200]
            assert (await ask(client, "/v1/messages", key))[0] == 200, "a place is free again"
            assert len(session.recording.turns) == 3

    run(use)


def test_bodies_headers_prompts_and_choices_are_bounded() -> None:
    async def use() -> None:
        engine = Speaker(["yes"], TOKENIZER)
        engine.context_length = 64
        async with served(engine) as (access, client, session):
            key = {"Authorization": f"Bearer {access.api_key}"}
            for path in ("/v1/chat/completions", "/v1/messages"):
                long = [{"role": "user", "content": "x" * 9_000_000}]
                assert (await ask(client, path, key, messages=long))[0] == 413
                middle = [{"role": "user", "content": "x" * 100_000}]
                assert (await ask(client, path, key, messages=middle))[0] == 400
            assert (await ask(client, "/v1/chat/completions", key, n=129))[0] == 400
            for headers in ({"X-Long": "x" * 10_000}, {f"X-{number}": "x" for number in range(300)}):
                async with client.get("/v1/models", headers={**key, **headers}) as response:
                    assert response.status == 400
            assert session.recording.turns == []

    run(use)


@pytest.mark.parametrize(
    "change",
    [
        {"chat_template": "{{ cycler.__init__.__globals__ }}"},
        {"chat_template_kwargs": {"a": 1}},
        {"lora_path": "/tmp/adapter"},
        {"model_path": "/etc/passwd"},
        {"guided_grammar": "x"},
        {"model": "/etc/passwd"},
        {"model": "../../other"},
    ],
)
def test_no_request_brings_a_template_a_path_or_a_model(change: dict[str, str]) -> None:
    async def use() -> None:
        async with served() as (access, client, session):
            for path in DIALECTS:
                status, _ = await ask(client, path, {"X-Api-Key": access.api_key}, **change)
                assert status in (400, 404), path
            for path in ("/load_lora_adapter", "/update_weights", "/v1/files", "/pause", "/collective_rpc"):
                assert (await ask(client, path, {"X-Api-Key": access.api_key}))[0] == 404
            assert session.recording.turns == []

    run(use)


class Failing(Speaker):
    """Fails with an exception that holds the prompt and a path."""

    def __init__(self, error: Exception) -> None:
        super().__init__(["x"], TOKENIZER)
        self._error = error

    def _next(self, request: Any) -> Any:
        raise self._error


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("kind", [ValueError, WorkerError])
def test_a_failure_tells_no_path_and_logs_no_prompt(
    kind: type[Exception], is_stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def use() -> None:
        error = kind(f"worker 0 died reading /srv/models/secret/model.safetensors\n{SECRET}")
        async with served(Failing(error)) as (access, client, _):
            key = {"Authorization": f"Bearer {access.api_key}"}
            for path in BODIES:
                if path.endswith("count_tokens"):
                    continue
                status, body = await ask(client, path, key, stream=is_stream)
                text = json.dumps(body)
                assert status in (500, 503)
                assert "secret" not in text
                assert SECRET not in text
            expected = 503 if kind is WorkerError else 200
            assert (await ask(client, "/health", {}, "GET"))[0] == expected

    run(use)
    assert SECRET not in caplog.text
    assert ("Traceback" in caplog.text or "test_guard.py" in caplog.text) == (kind is ValueError)


# -- the token of `rlite serve` ----------------------------------------------------------------------------------------


def test_a_token_file_is_made_for_its_owner_alone_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "new" / "token"
    token = find_token(file, {})
    assert len(token) >= 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert find_token(file, {}) == token
    assert find_token(tmp_path / "other", {}) != token
    assert find_token(file, {TOKEN_VARIABLE: "0123456789abcdef"}) == "0123456789abcdef"


def test_a_token_that_others_can_read_or_guess_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef")
    for mode in (0o644, 0o640, 0o602):
        file.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            find_token(file, {})
    file.chmod(0o600)
    assert find_token(file, {}) == "0123456789abcdef"
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "pipe", "."):
        with pytest.raises(ConfigError, match="token_file="):
            find_token(tmp_path / name, {})
    for token in ("short", "", "with space 0123456789", "ünicode0123456789"):
        file.write_text(token)
        with pytest.raises(ConfigError, match="expected a token of 16 or more"):
            find_token(file, {})
        with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
            find_token(file, {TOKEN_VARIABLE: token})
