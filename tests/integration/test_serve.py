"""`rlite serve`: a process that the official client asks, and many sessions in all dialects of which some leave."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from rlite.rollout.openai import Access, AgentEndpoint, AgentSession
from rlite.services.endpoint.connections import find_capacity
from tests.agents import Speaker, tokenizer_with
from tests.tiny import build_model_dir

TOKENIZER = tokenizer_with()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("models") / "tiny", hidden=64)


@pytest.fixture
def address(model: Path, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The address and the token of a server, which ends well when it is asked to."""
    command = [sys.executable, "-m", "rlite.cli", "serve", str(model), "port=0", f"token_file={tmp_path / 'token'}"]
    command += ["max_model_len=256", "max_new_tokens=8", "executor_options={kv_cache_memory_bytes: 100000000}"]
    environment = {key: value for key, value in os.environ.items() if key != "RLITE_SERVE_TOKEN"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    try:
        told = next(line for line in lines if " at http://" in line)
        assert f"$(cat {tmp_path / 'token'})" in told
        assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
        yield told.split(" at ")[1].split(",")[0], (tmp_path / "token").read_text().strip()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_command_serves_its_model_until_it_is_ended(address: tuple[str, str]) -> None:
    url, token = address
    client = openai.OpenAI(base_url=url, api_key=token, max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    hello: list[Any] = [{"role": "user", "content": "hello"}]
    options: dict[str, Any] = {"model": "tiny", "messages": hello, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert whole.usage is not None
    assert 0 < whole.usage.completion_tokens <= 8
    parts = [part.choices[0].delta.content or "" for part in client.chat.completions.create(**options, stream=True)]
    assert "".join(parts) == whole.choices[0].message.content
    said = client.responses.create(model="tiny", input="hello", temperature=0)
    assert said.output_text == whole.choices[0].message.content
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(model="tiny", prompt="x" * 1000)


# -- many sessions -----------------------------------------------------------------------------------------------------

ANSWER = "four and five"
KINDS = ("chat", "completion", "responses", "messages", "generate")


def request(kind: str, history: list[str]) -> tuple[str, dict[str, Any]]:
    """Path and body of a turn: questions and answers so far, and the next question."""
    talk = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(history)]
    shared = {"model": "policy", "stream": True}
    return {
        "chat": ("/v1/chat/completions", {**shared, "messages": talk}),
        "completion": ("/v1/completions", {**shared, "prompt": "\n".join(history)}),
        "responses": ("/v1/responses", {**shared, "input": talk}),
        "messages": ("/v1/messages", {**shared, "messages": talk, "max_tokens": 99}),
        "generate": (
            "/inference/v1/generate",
            {**shared, "token_ids": TOKENIZER("\n".join(history))["input_ids"], "sampling_params": {"logprobs": 1}},
        ),
    }[kind]


def text_of(kind: str, events: list[Any]) -> str:
    """The text of a stream's events."""
    if kind == "generate":
        ids = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
        return TOKENIZER.decode(ids, skip_special_tokens=True)
    if kind in ("chat", "completion"):
        choices = [choice for event in events for choice in event["choices"]]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    if kind == "messages":
        return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


async def talk(client: aiohttp.ClientSession, access: Access, kind: str, leaves_in: int | None) -> int:
    """Number of answers that the client has read to their end; it leaves in the middle of the given turn."""
    history = ["begin"]
    for turn in range(3):
        path, body = request(kind, history)
        headers = {"X-Api-Key": access.api_key}
        async with client.post(access.root + path, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            if turn == leaves_in:
                await response.content.readline()
                response.close()
                return turn
            lines = (await response.text()).split("\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        said = text_of(kind, events)
        assert said == ANSWER
        history += [said, f"go on {turn}"]
    return 3


def check_sessions(num_sessions: int, latency: float) -> None:
    """Let sessions of three turns run at once, of which 30 % leave in a stream, and check what was recorded."""
    find_capacity()
    chance = random.Random(0)
    kinds = [KINDS[number % len(KINDS)] for number in range(num_sessions)]
    leaving = [chance.randrange(3) if chance.random() < 0.3 else None for _ in kinds]

    async def use() -> tuple[list[int], list[AgentSession], Counter[str]]:
        sessions = [AgentSession(Speaker([ANSWER], TOKENIZER, latency=latency), TOKENIZER) for _ in kinds]

        async def one(number: int, endpoint: AgentEndpoint, client: aiohttp.ClientSession) -> int:
            async with endpoint.serving(sessions[number]) as access:
                return await talk(client, access, kinds[number], leaving[number])

        connector = aiohttp.TCPConnector(limit=0)
        async with AgentEndpoint() as endpoint, aiohttp.ClientSession(connector=connector) as client:
            return [
                await asyncio.gather(*(one(number, endpoint, client) for number in range(num_sessions))),
                sessions,
                endpoint.dropped,
            ]  # type: ignore[return-value]

    counts, sessions, dropped = asyncio.run(asyncio.wait_for(use(), 280))
    assert counts == [3 if turn is None else turn for turn in leaving]
    assert not dropped
    for count, turn, session in zip(counts, leaving, sessions, strict=True):
        completed = session.recording.completed()
        assert len(completed) == count, "an answer counts once, if the client has all of it"
        assert len(session.recording.turns) == count + (turn is not None)
        ids = TOKENIZER(ANSWER)["input_ids"] + [TOKENIZER.eos_token_id]
        assert [each.output_ids for each in completed] == [ids] * count
        assert len({each.id for each in completed}) == count


def test_no_answer_of_many_sessions_is_lost_or_counted_twice() -> None:
    check_sessions(20, latency=0.5)


@pytest.mark.nightly
def test_no_answer_of_two_hundred_sessions_is_lost_or_counted_twice() -> None:
    check_sessions(200, latency=2.0)
