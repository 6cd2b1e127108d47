"""`executor="remote"` over servers that refuse, hang, break off and lose requests."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlite
from rlite.backends.remote.server import ADMIN_VARIABLE
from rlite.data.prompts import raw_prompts
from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.errors import ConfigError, DataError, ResidencyError, WorkerError
from rlite.nn.pretrained import load_tokenizer
from tests.integration.modules import Qwen2Policy, on_meta
from tests.tiny import build_model_dir

PROMPTS = [[5, 6, 7], [8, 9]]
ADMIN = "the-token-of-the-administrator"
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
pytestmark = pytest.mark.slow


def expected(prompt: list[int], num: int = 6) -> list[int]:
    """The answer of every server: each token is the sum of those before it, modulo 50."""
    ids = list(prompt)
    for _ in range(num):
        ids.append(sum(ids) % 50)
    return ids[len(prompt) :]


class Handler(http.server.BaseHTTPRequestHandler):
    """The routes of a server of models. `faults` says how the next streamed requests go wrong."""

    protocol_version = "HTTP/1.1"
    server: Faulty

    def do_GET(self) -> None:
        if self.path == "/health":
            return self.say(200 if self.server.is_well else 503, {})
        self.say(200, {"data": [{"id": "tiny", "max_model_len": 512}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/admin/weights":
            return self.load(body)
        if self.path == "/v1/completions":
            (ids,) = raw_prompts(self.server.tokenizer, [body["prompt"]])
            return self.say(200, {"choices": [{"prompt_token_ids": ids}]})
        num, sampling = body["sampling_params"]["max_tokens"], body["sampling_params"]
        made = expected(body["token_ids"], num)
        logprob = -0.01 if sampling.get("temperature") == 0.01 else -1.0
        if not body.get("stream"):
            return self.say(200, {"choices": [self.choice(made, logprob, "length")]})
        self.server.asked.append(len(body["token_ids"]))
        fault = self.server.faults.pop(0) if self.server.faults else self.server.always
        if fault == "silence":
            self.server.is_over.wait(60)
        elif isinstance(fault, int):
            self.say(fault, {"error": {"message": "not now"}}, {"Retry-After": self.server.retry_after})
        else:
            self.stream(made, logprob, fault)

    def load(self, body: dict[str, Any]) -> None:
        """Load weights, unless the server has no such route (404), or `loads` says that it refuses or hangs."""
        if self.headers["Authorization"] != f"Bearer {ADMIN}" or self.server.loads == 404:
            return self.say(self.server.loads or 401, {"error": {"message": "no"}})
        if not body:
            return self.say(400, {"error": {"message": "expected a path"}})
        if self.server.loads == "silence":
            self.server.is_over.wait(60)
        if self.server.loads == 400:
            return self.say(400, {"error": {"message": "that folder is none of mine"}})
        self.server.loaded.append((Path(body["path"]).name, body["version"]))
        self.say(200, {"version": -1 if self.server.loads == "another" else body["version"]})

    def choice(self, ids: list[int], logprob: float, reason: str | None) -> dict[str, Any]:
        content = [{"token": f"token_id:{each}", "logprob": logprob} for each in ids]
        return {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": reason}

    def stream(self, made: list[int], logprob: float, fault: str | None) -> None:
        """Send each token as an event; "broken" sends two, and then half an event."""
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for index, token in enumerate(made):
            reason = "length" if index == len(made) - 1 else None
            event = f"data: {json.dumps({'choices': [self.choice([token], logprob, reason)]})}\n\n".encode()
            if fault == "broken" and index == 2:
                self.wfile.write(event[: len(event) // 2])
                break
            self.wfile.write(event)
        self.close_connection = True

    def say(self, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(text))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class Faulty(http.server.ThreadingHTTPServer):
    """A server of models at a free port."""

    def __init__(self, model: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokenizer, self.is_well, self.is_over = load_tokenizer(str(model)), True, threading.Event()
        self.faults: list[Any] = []
        self.always: Any = None
        self.retry_after = "1"
        self.loads: Any = None
        self.loaded: list[tuple[str, int]] = []
        """folders and versions of loaded weights"""
        self.asked: list[int] = []
        """length of each streamed request"""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def end(self) -> None:
        self.is_over.set()
        self.shutdown()
        self.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("models") / "tiny", hidden=64)


@pytest.fixture
def servers(model: Path) -> Iterator[list[Faulty]]:
    servers = [Faulty(model), Faulty(model)]
    yield servers
    for server in servers:
        server.end()


@pytest.fixture
def session() -> Iterator[None]:
    rlite.init(num_devices=1)
    yield
    rlite.shutdown()


def engine_of(model: Path, servers: list[Faulty], max_replacements: int = 0, **options: Any) -> RliteInferenceEngine:
    engine = RliteInferenceEngine(model, executor="remote", max_replacements=max_replacements)
    engine.build(addresses=[server.url for server in servers], start_timeout_s=1.0, **options)
    return engine


def tokens(engine: RliteInferenceEngine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in engine.generate(prompts, GREEDY)]


def test_a_request_that_is_refused_as_too_many_is_served_later(
    model: Path, servers: list[Faulty], session: None
) -> None:
    engine, server = engine_of(model, servers[:1]), servers[0]
    server.faults = [429, 429, 429]
    assert tokens(engine) == [expected(prompt) for prompt in PROMPTS]
    assert len(server.asked) == 5
    assert engine.lost_replicas == []


def test_a_server_is_asked_again_when_it_wants_to_be(model: Path, servers: list[Faulty], session: None) -> None:
    engine, server = engine_of(model, servers[:1]), servers[0]
    for retry_after, least, most in (("3", 3, 20), ("Fri, 27 Nov 2026 11:00:00 GMT", 1, 3), ("1e9", 1, 3)):
        server.faults, server.retry_after, started = [429], retry_after, time.monotonic()
        assert tokens(engine, PROMPTS[:1]) == [expected(PROMPTS[0])]
        assert least <= time.monotonic() - started < most


def test_a_server_that_wants_to_be_asked_too_late_counts_as_lost(
    model: Path, servers: list[Faulty], session: None
) -> None:
    engine = engine_of(model, servers[:1], stall_timeout_s=2.5)
    servers[0].always, servers[0].retry_after, started = 429, "100000", time.monotonic()
    with pytest.raises(WorkerError, match="no token"):
        tokens(engine)
    assert 2.5 < time.monotonic() - started < 10


def test_a_request_that_waits_for_its_next_attempt_is_not_lost_in_a_pause(
    model: Path, servers: list[Faulty], session: None
) -> None:
    engine, server = engine_of(model, servers[:1]), servers[0]
    server.faults, server.retry_after = [429], "30"
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.extend(tokens(engine, PROMPTS[:1])))
    asking.start()
    while not server.asked:
        time.sleep(0.01)
    time.sleep(0.2)
    engine.pause()
    engine.resume()
    asking.join(20)
    assert answers == [expected(PROMPTS[0])]


def test_a_server_that_stays_full_counts_as_lost_in_the_end(model: Path, servers: list[Faulty], session: None) -> None:
    engine = engine_of(model, servers[:1], stall_timeout_s=2.5)
    servers[0].always = 429
    started = time.monotonic()
    with pytest.raises(WorkerError, match="no token"):
        tokens(engine)
    assert 2.5 < time.monotonic() - started < 60
    assert len(servers[0].asked) > 2


def test_a_server_that_never_answers_loses_its_requests_to_the_others(
    model: Path, servers: list[Faulty], session: None
) -> None:
    engine = engine_of(model, servers, stall_timeout_s=1.5)
    servers[1].always = "silence"
    assert tokens(engine) == [expected(prompt) for prompt in PROMPTS]
    assert [lost.replica for lost in engine.lost_replicas] == [1]


def test_a_stream_that_breaks_off_goes_on_from_its_tokens(model: Path, servers: list[Faulty], session: None) -> None:
    engine, server = engine_of(model, servers[:1]), servers[0]
    server.faults = ["broken"]
    assert tokens(engine, PROMPTS[:1]) == [expected(PROMPTS[0])]
    assert server.asked == [3, 5]
    assert engine.lost_replicas == []


@pytest.mark.parametrize("fault", [500, "broken"])
def test_requests_of_a_sick_server_are_served_elsewhere_and_counted(
    fault: Any, model: Path, servers: list[Faulty], session: None
) -> None:
    engine = engine_of(model, servers)
    servers[1].always, servers[1].is_well = fault, False
    assert tokens(engine) == [expected(prompt) for prompt in PROMPTS]
    assert [(lost.replica, lost.num_moved) for lost in engine.lost_replicas] == [(1, 1)]


def test_a_request_that_a_healthy_server_always_fails_ends_with_its_error(
    model: Path, servers: list[Faulty], session: None
) -> None:
    engine = engine_of(model, servers[:1])
    servers[0].always = 500
    with pytest.raises(DataError, match="not now"):
        tokens(engine, PROMPTS[:1])
    assert len(servers[0].asked) == 6
    servers[0].always = None
    assert tokens(engine) == [expected(prompt) for prompt in PROMPTS]


def test_prompt_log_probabilities_are_refused(model: Path, servers: list[Faulty], session: None) -> None:
    with pytest.raises(ConfigError, match=r"prompt_logprobs: the executor 'remote' does not offer this"):
        engine_of(model, servers).prompt_logprobs(PROMPTS)


def test_servers_are_asked_under_the_ray_launcher(model: Path, servers: list[Faulty]) -> None:
    rlite.init(device="cpu", num_devices=1, launcher="ray")
    try:
        assert tokens(engine_of(model, servers)) == [expected(prompt) for prompt in PROMPTS]
    finally:
        rlite.shutdown()


def synced_engine(
    model: Path, servers: list[Faulty], folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[RliteTrainEngine, RliteInferenceEngine]:
    monkeypatch.setenv(ADMIN_VARIABLE, ADMIN)
    engine = engine_of(model, servers, weights_folder=str(folder), **options)
    train = RliteTrainEngine(on_meta(Qwen2Policy, model))
    train.build(colocate_with=engine)
    return train, engine


@pytest.mark.parametrize("fault", [400, "another", "silence"])
@pytest.mark.parametrize("max_replacements", [0, 3])
def test_a_server_that_does_not_load_is_named_and_left_out_until_it_does(
    fault: Any,
    max_replacements: int,
    model: Path,
    servers: list[Faulty],
    session: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"max_replacements": max_replacements, "stall_timeout_s": 2.0}
    train, engine = synced_engine(model, servers, tmp_path, monkeypatch, **options)
    train.p2p_weight_sync(engine)
    servers[1].loads = fault
    assert train.p2p_weight_sync(engine).version == engine.get_version() == 2
    assert (engine.num_replicas, tokens(engine)) == (1, [expected(prompt) for prompt in PROMPTS])
    (lost,) = engine.lost_replicas
    reason = {400: "none of mine", "another": "answers version -1", "silence": "did not answer /admin/weights"}[fault]
    assert "version 2 of the weights is not served" in lost.reason
    assert servers[1].url in lost.reason
    assert reason in lost.reason
    servers[1].loads = None
    engine.wait_for_replacements()
    assert engine.num_replicas == 1
    train.p2p_weight_sync(engine)
    assert engine.num_replicas == (2 if max_replacements else 1)
    assert servers[0].loaded == [(f"version-{number}", number) for number in (1, 2, 3)]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["version-2", "version-3"]


def test_a_sync_that_reaches_no_server_raises_and_the_next_may_succeed(
    model: Path, servers: list[Faulty], session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, engine = synced_engine(model, servers, tmp_path, monkeypatch, max_replacements=3)
    for server in servers:
        server.loads = 400
    with pytest.raises(WorkerError, match="none of mine"):
        train.p2p_weight_sync(engine)
    with pytest.raises(ResidencyError, match="sync weights into it"):
        tokens(engine)
    for server in servers:
        server.loads = None
    engine.wait_for_replacements()
    assert train.p2p_weight_sync(engine).version == 1
    assert engine.num_replicas == 2
    assert tokens(engine) == [expected(prompt) for prompt in PROMPTS]
    engine.set_version(7)  # as a resumed run does: the servers report it too
    assert [server.loaded[-1] for server in servers] == [("version-1", 7)] * 2


def test_servers_without_the_route_and_wrong_tokens_are_refused_at_build(
    model: Path, servers: list[Faulty], session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ADMIN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="RLITE_ADMIN_TOKEN or admin_token_file"):
        engine_of(model, servers, weights_folder=str(tmp_path))
    secret = tmp_path / "admin"
    secret.write_text("a-token-of-somebody-else")
    options = {"weights_folder": str(tmp_path), "admin_token_file": str(secret)}
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        engine_of(model, servers, **options)
    secret.chmod(0o600)
    with pytest.raises(ConfigError, match=r"HTTP 401.*admin_token_file") as refused:
        engine_of(model, servers, **options)
    assert "somebody-else" not in str(refused.value)
    secret.write_text(ADMIN)
    servers[1].loads = 404
    with pytest.raises(ConfigError, match=r"HTTP 404.*rlite serve"):
        engine_of(model, servers, **options)
    with pytest.raises(ConfigError, match="absolute path"):
        engine_of(model, servers, **{**options, "weights_folder": "weights"})
    with pytest.raises(ConfigError, match="it is for weights_folder"):
        engine_of(model, servers, admin_token_file=str(secret))
    train = RliteTrainEngine(on_meta(Qwen2Policy, model))
    engine = engine_of(model, servers)
    train.build(colocate_with=engine)
    with pytest.raises(ConfigError, match=r"p2p_weight_sync.*fixed without weights_folder"):
        train.p2p_weight_sync(engine)
