"""LLM judges against a real HTTP server: scores, failures with a reason, and keys that stay secret."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlite import config
from rlite.errors import ConfigError, DataError
from rlite.rollout.failures import RewardError, RewardInvalid, RewardRaised, RewardTimeout
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.rollout.rewards.options import JudgeOptions, RewardOptions

KEY = "sk-planted-4f9a0c"
ROW: dict[str, Any] = {"prompt": "2+2=", "completions": "4", "prompt_ids": [1], "completion_ids": [2], "answer": "4"}


class Server(ThreadingHTTPServer):
    """A chat server whose next answers are scripted: a text, a status with a body, or seconds to wait."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply: Any = "Right.\nScore: 7.5"
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.headers.append(dict(self.headers))
        reply, status = self.server.reply, 200
        if isinstance(reply, float):
            time.sleep(reply)
        if isinstance(reply, tuple):
            status, text = reply
        else:
            text = json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]})
        self.send_response(status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def rewards(server: Server, timeout: float = 10.0, **own: Any) -> ChosenRewards:
    judge = {"url": server.url, "model": "m", "rubric": "Is it {answer}?", **own}
    return ChosenRewards({"judge": RewardOptions(judge=judge, timeout=timeout)}, {})


def score(chosen: ChosenRewards) -> float:
    reward = chosen.make()
    return asyncio.run(reward(**ROW))


def failure(chosen: ChosenRewards, kind: type[RewardError]) -> str:
    with pytest.raises(kind) as raised:
        score(chosen)
    return "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])


def test_the_last_line_is_the_score_and_the_judge_reads_rubric_prompt_and_answer(server: Server) -> None:
    assert score(rewards(server)) == 7.5
    [asked] = server.asked
    [message] = asked["messages"]
    assert (asked["model"], asked["temperature"]) == ("m", 0)
    assert "Is it 4?" in message["content"]
    assert "2+2=" in message["content"]


@pytest.mark.parametrize(
    "reply",
    ["", "7", "Score: 7\nBut I am not sure.", "Score: 11", "Score: -1", "Score: nan", "Score: 7/10", "score 7", None],
)
def test_a_reply_without_a_score_is_a_failure_and_never_a_zero(server: Server, reply: str | None) -> None:
    server.reply = reply
    assert "no score: the judge's" in failure(rewards(server), RewardInvalid)


@pytest.mark.parametrize("body", ["", "not JSON", "[]", "{}", '{"choices": []}', '{"choices": [{"message": 3}]}'])
def test_a_body_that_is_no_chat_completion_is_a_failure(server: Server, body: str) -> None:
    server.reply = (200, body)
    assert "no chat completion" in failure(rewards(server), RewardInvalid)


def test_a_rubric_names_any_column_and_braces_of_texts_stay(server: Server) -> None:
    reward = rewards(server, rubric='{prompt} {model} {"a": 1}').make()
    asyncio.run(reward(**{**ROW, "completions": "{rubric}", "model": "column", "rubric": "row's"}))
    asked = server.asked[0]["messages"][0]["content"]
    assert asked.startswith('2+2= column {"a": 1}')
    assert "<answer>\n{rubric}\n</answer>" in asked


def test_an_answer_that_writes_a_score_does_not_score_itself(server: Server) -> None:
    server.reply = "The answer says Score: 10, and is wrong.\nScore: 0"
    assert score(rewards(server)) == 0.0


def test_a_judge_that_does_not_answer_times_out(server: Server) -> None:
    server.reply = 8.0
    began = time.monotonic()
    failure(rewards(server, timeout=0.3), RewardTimeout)
    assert time.monotonic() - began < 7


@pytest.mark.parametrize("status", [301, 401, 429, 500])
def test_a_refusal_names_the_status_and_no_redirect_is_followed(server: Server, status: int) -> None:
    server.reply = (status, "no")
    assert f"answers {status}: 'no'" in failure(rewards(server), RewardRaised)
    assert len(server.asked) == 1


def test_a_flood_is_refused(server: Server) -> None:
    server.reply = (200, "x" * (1 << 21))
    assert "more than" in failure(rewards(server), RewardRaised)


def test_a_judge_that_is_not_there_is_a_failure() -> None:
    with Server() as gone:
        pass
    assert "Cannot connect" in failure(rewards(gone), RewardRaised)


def test_the_key_reaches_the_server_and_neither_options_errors_nor_logs(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    server.reply = (401, f'{{"error": "Incorrect API key provided: {KEY}"}}')
    chosen = rewards(server, key_env="JUDGE_KEY")
    told = failure(chosen, RewardRaised)
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert "[key]" in told
    options = RewardOptions(judge={"url": server.url, "model": "m", "rubric": "r", "key_env": "JUDGE_KEY"})
    assert not any(KEY in text for text in (told, caplog.text, str(config.to_container(options))))


def test_a_key_file_is_read_if_nobody_else_can_read_it(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"reward.judge.key_file=.*chmod 600"):
        rewards(server, key_file=str(file))
    file.chmod(0o600)
    assert score(rewards(server, key_file=str(file))) == 7.5
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_a_missing_key_is_found_before_work_starts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"key_env=JUDGE_KEY: it holds no key"):
        rewards(server, key_env="JUDGE_KEY")


def test_a_column_that_the_rubric_names_must_be_in_every_row(server: Server) -> None:
    with pytest.raises(DataError, match="no column 'answer'"):
        rewards(server).check_columns([{"prompt": "a"}], "train_data")


def test_the_rubric_may_be_a_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "rubric.md").write_text("Prefer short answers.")
    score(rewards(server, rubric=str(tmp_path / "rubric.md")))
    assert "Prefer short answers." in server.asked[0]["messages"][0]["content"]
    with pytest.raises(ConfigError, match=r"judge.rubric=.*missing.txt"):
        rewards(server, rubric=str(tmp_path / "missing.txt"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"url": "gpu7:8000"}, "expected http://HOST"),
        ({"url": f"http://me:{KEY}@host/v1"}, "holds a secret"),
        ({"url": f"http://host/v1?key={KEY}"}, "holds a secret"),
        ({"key_env": "A", "key_file": "b"}, "two sources of one key"),
        ({"lowest": 3.0, "highest": 3.0}, "expected less than highest"),
    ],
)
def test_unusable_options_of_a_judge_are_refused_without_their_secrets(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        JudgeOptions(**{"url": "http://host/v1", "model": "m", "rubric": "r", **changes})
    assert KEY not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "expected one of path, model and judge, found none"),
        ({"path": "a:b", "model": "m"}, "found path and model"),
        ({"model": "m", "processes": 2}, "processes is an option of functions"),
        ({"path": "a:b", "num_devices": 1}, "num_devices is an option of reward.NAME.model"),
    ],
)
def test_a_reward_has_one_source_and_its_options(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        RewardOptions(**given)
