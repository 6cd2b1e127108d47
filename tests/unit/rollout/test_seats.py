from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.errors import ConfigError, DataError, RolloutError
from rlite.rollout import GenerationHyperparameters, LLMRequest, RolloutCollector, ScriptedEngine
from rlite.rollout.seats import SeatsWorkflow, endpoint_player

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id
SAMPLING = GenerationHyperparameters(max_new_tokens=32)


def ids(text: str) -> list[int]:
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], END]


def echo(request: LLMRequest) -> list[int]:
    """Answer with the number of turns that were read."""
    text = TOKENIZER.decode(request.input_ids)
    return ids(f"turn {text.count('<|im_start|>assistant')}")


async def talk(seats: Any, data: dict[str, Any]) -> dict[str, float]:
    first = await seats["author"].say("write")
    second = await seats["critic"].say(f"judge {first}")
    third = await seats["author"].say(f"it said {second}")
    data["seen"] = [first, second, third]
    return {"author": 1.0, "critic": -1.0}


def run(play: Any, players: Any, engine: Any = None, **options: Any) -> Any:
    workflow = SeatsWorkflow(play, players, SAMPLING, TOKENIZER, **options)
    return asyncio.run(workflow.arun_episode(engine or ScriptedEngine(echo), {"question": "?"}))


def test_each_trained_seat_is_a_trajectory_with_its_own_turns_and_reward() -> None:
    rows = run(talk, {"author": "policy", "critic": "policy"}, system_prompts={"critic": "be strict"})
    assert rows["seat_ids"].tolist() == [0, 1]
    assert rows["sequence_index"].tolist() == [0, 0]
    assert rows["num_turns"].tolist() == [2, 1]
    assert rows["rewards"].tolist() == [1.0, -1.0]
    texts = [TOKENIZER.decode(row[mask]) for row, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True)]
    expected = [
        [("user", "write"), ("assistant", "turn 1"), ("user", "it said turn 1"), ("assistant", "turn 2")],
        [("system", "be strict"), ("user", "judge turn 1"), ("assistant", "turn 1")],
    ]
    for text, turns in zip(texts, expected, strict=True):
        rendered = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        assert text == rendered.removesuffix("\n")
    assert rows["reward/author"].nan_to_num(9.0).tolist() == [1.0, 9.0]
    assert rows["reward/critic"].nan_to_num(9.0).tolist() == [9.0, -1.0]


def test_frozen_engines_and_functions_play_without_rows() -> None:
    asked: list[Any] = []

    async def bored(messages: list[Any]) -> str:
        asked.append([message["content"] for message in messages])
        return "hm"

    frozen = ScriptedEngine([ids("frozen")])
    for critic in (frozen, bored, "policy_untrained"):
        rows = run(talk, {"author": "policy", "critic": critic})
        assert rows["seat_ids"].tolist() == [0]
        assert rows["rewards"].tolist() == [1.0]
    assert frozen.num_requests == 1
    assert asked == [["judge turn 1"]]


def test_groups_of_seats_pass_the_collector() -> None:
    collector = RolloutCollector(ScriptedEngine(echo))
    workflow = SeatsWorkflow(talk, {"author": "policy", "critic": "policy"}, SAMPLING, TOKENIZER)
    batch = collector.rollout_batch([{"question": "a"}, {"question": "b"}], workflow, group_size=2)
    assert batch["seat_ids"].tolist() == [0, 1] * 4
    assert batch["group_ids"].tolist() == [0] * 4 + [1] * 4
    collector.close()


async def silent(seats: Any, data: dict[str, Any]) -> dict[str, float]:
    return {}


async def unjudged(seats: Any, data: dict[str, Any]) -> dict[str, float]:
    await seats["author"].say("write")
    return {"critic": 1.0}


async def repeating(seats: Any, data: dict[str, Any]) -> dict[str, float]:
    await seats["author"].say("write")
    await seats["author"].say()
    return {"author": 1.0}


@pytest.mark.parametrize(
    ("play", "error", "message"),
    [
        (silent, RolloutError, "asked no trained seat"),
        (unjudged, DataError, "a finite reward for the seat 'author'"),
        (repeating, ConfigError, "needs a message"),
        (lambda seats, data: 1, ConfigError, "async def"),
    ],
)
def test_an_episode_that_cannot_be_trained_on_says_why(play: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        run(play, {"author": "policy"})


@pytest.mark.parametrize(
    ("players", "options", "message"),
    [
        ({"a": "policy_untrained"}, {}, "nothing to train"),
        ({"a": "policy", "b": "polcy"}, {}, "seat b"),
        ({"a": "policy"}, {"system_prompts": {"b": "x"}}, "no seat has the name b"),
    ],
)
def test_seats_are_checked_before_an_episode(players: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(talk, players, **options)


@pytest.fixture
def chat_server() -> Iterator[tuple[str, list[Any]]]:
    requests: list[Any] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, self.headers.get("Authorization"), body))
            answer = json.dumps({"choices": [{"message": {"role": "assistant", "content": "fine"}}]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: Any) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", requests
    server.shutdown()
    server.server_close()


def test_an_endpoint_plays_by_openais_chat_interface(
    chat_server: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, requests = chat_server
    monkeypatch.setenv("SEAT_KEY", "secret")
    critic = endpoint_player(url, "judge", api_key_variable="SEAT_KEY", temperature=0.5)
    rows = run(talk, {"author": "policy", "critic": critic})
    assert "it said fine" in TOKENIZER.decode(rows["input_ids"][0])
    messages = [{"role": "user", "content": "judge turn 1"}]
    assert requests == [
        ("/v1/chat/completions", "Bearer secret", {"model": "judge", "messages": messages, "temperature": 0.5})
    ]
    with pytest.raises(ConfigError, match="NO_SUCH"):
        endpoint_player(url, "judge", api_key_variable="NO_SUCH")
    with pytest.raises(ConfigError, match="http://"):
        endpoint_player("file:///etc", "judge")
