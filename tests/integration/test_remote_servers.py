"""`executor="remote"` over real `rlite serve` processes: equal answers, a killed server, and refusals."""

from __future__ import annotations

import http.server
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlite
from rlite.backends.remote.server import KEY_VARIABLE
from rlite.cli import main
from rlite.engine.inference import RliteInferenceEngine
from rlite.errors import ConfigError, DataError
from tests.tiny import build_model_dir

KEY = "the-key-of-both-servers"
PROMPTS = [[5, 6, 7], [8, 9]]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0, "max_new_tokens": 24},
    {"temperature": 0.7, "seed": 5, "n_samples": 3, "max_new_tokens": 24},
    {"seed": 11, "max_new_tokens": 24, "min_new_tokens": 4, "stop": ["a", "e", "t"]},
]
pytestmark = pytest.mark.slow


class Server:
    """A process of `rlite serve` that can be killed and started again at its port."""

    def __init__(self, model: Path, port: int = 0, *options: str) -> None:
        command = [
            sys.executable,
            "-m",
            "rlite.cli",
            "serve",
            str(model),
            f"port={port}",
            "max_model_len=512",
            *options,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RLITE_SERVE_TOKEN": KEY}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        self.url = next(line for line in lines if " at http://" in line).split(" at ")[1].split(",")[0]
        self.port = int(self.url.removesuffix("/v1").rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("models") / "tiny", hidden=64)


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[list[Server]]:
    servers = [Server(model) for _ in range(2)]
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def local(model: Path) -> Iterator[RliteInferenceEngine]:
    rlite.init(num_devices=1)
    engine = RliteInferenceEngine(model)
    engine.build(max_model_len=512)
    yield engine
    rlite.shutdown()


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


@pytest.fixture
def remote(model: Path, servers: list[Server], local: RliteInferenceEngine) -> Iterator[RliteInferenceEngine]:
    engine = RliteInferenceEngine(model, executor="remote")
    engine.build(addresses=[server.url for server in servers], colocate_with=local)
    yield engine
    engine.release()


@pytest.mark.parametrize("sampling", SAMPLING)
def test_remote_servers_answer_as_the_local_engine(
    remote: RliteInferenceEngine, local: RliteInferenceEngine, sampling: dict[str, Any]
) -> None:
    assert remote.num_replicas == 2
    for theirs, own in zip(remote.generate(PROMPTS, sampling), local.generate(PROMPTS, sampling), strict=True):
        for answer, expected in zip(theirs.outputs, own.outputs, strict=True):
            assert answer.token_ids == expected.token_ids
            assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            assert answer.finish_reason == expected.finish_reason


def test_a_paused_engine_goes_on_with_the_same_tokens(
    remote: RliteInferenceEngine, local: RliteInferenceEngine
) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.extend(remote.generate(PROMPTS, sampling)))
    asking.start()
    wait_until(lambda: remote.num_in_flight == len(PROMPTS))
    remote.pause()
    remote.resume()
    asking.join()
    assert [each.outputs[0].token_ids for each in answers] == [
        each.outputs[0].token_ids for each in local.generate(PROMPTS, sampling)
    ]


def test_a_killed_server_costs_no_sample_and_joins_again_when_it_is_back(
    model: Path, servers: list[Server], remote: RliteInferenceEngine, local: RliteInferenceEngine
) -> None:
    sampling = {"seed": 3, "n_samples": 2, "max_new_tokens": 300, "ignore_eos": True}
    prompts = [[number, number + 1] for number in range(1, 9)]
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.extend(remote.generate(prompts, sampling)))
    asking.start()
    wait_until(lambda: remote.num_in_flight == 16 and all(each.num_in_flight for each in remote._replicas.all))
    servers[1].kill()
    servers[1] = Server(model, servers[1].port)
    asking.join()
    expected = local.generate(prompts, sampling)
    assert [[o.token_ids for o in each.outputs] for each in answers] == [
        [o.token_ids for o in each.outputs] for each in expected
    ]
    assert [lost.replica for lost in remote.lost_replicas] == [1]
    assert remote.lost_replicas[0].num_moved > 0
    remote.wait_for_replacements()
    assert [each.replica for each in remote.replaced_replicas] == [1]
    assert remote.num_replicas == 2


def test_what_cannot_be_compared_is_refused_when_the_engine_is_built(
    model: Path,
    servers: list[Server],
    local: RliteInferenceEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def build(path: Path = model, **options: Any) -> str:
        engine = RliteInferenceEngine(path, executor="remote")
        with pytest.raises(ConfigError) as refused:
            engine.build(**{"addresses": [servers[0].url], "start_timeout_s": 0.1, **options}, colocate_with=local)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    caplog.set_level(logging.DEBUG)
    assert "the server at" in build(model="other")
    assert "['tiny']" in build(model="other")
    assert "takes at most 512 tokens" in build(max_model_len=1024)
    assert "did not answer /v1/models" in build(addresses=["http://127.0.0.1:9"])
    monkeypatch.setenv(KEY_VARIABLE, "a wrong key that is long")
    assert KEY_VARIABLE in (told := build())
    assert "wrong key" not in told + caplog.text
    monkeypatch.undo()
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    other = build_model_dir(tmp_path / "other", hidden=64)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = (key for key, id in vocabulary.items() if id in (vocabulary["a"], vocabulary["e"]))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "the tokenizer of the server" in build(other)


def test_a_truncated_answer_has_no_exact_log_probabilities(
    model: Path, servers: list[Server], local: RliteInferenceEngine
) -> None:
    engine = RliteInferenceEngine(model, executor="remote")
    engine.build(addresses=[servers[0].url], colocate_with=local)
    truncated = {"top_p": 0.5, "seed": 1, "max_new_tokens": 8}
    with pytest.raises(DataError, match=r"top_p=0\.5 .*logprobs=as_served"):
        engine.generate(PROMPTS, truncated)
    with pytest.raises(ConfigError, match="cannot change the weights"):
        engine.load()
    engine.release()
    engine.build(addresses=[servers[0].url], logprobs="as_served", colocate_with=local)
    (answer, _), (expected, _) = engine.generate(PROMPTS, truncated), local.generate(PROMPTS, truncated)
    assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
    engine.release()


class Odd(http.server.BaseHTTPRequestHandler):
    """A server that answers otherwise than a server of models."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def test_a_server_of_something_else_is_named(model: Path, local: RliteInferenceEngine) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        engine = RliteInferenceEngine(model, executor="remote")
        with pytest.raises(ConfigError, match="does not answer /v1/models"):
            engine.build(addresses=[f"http://127.0.0.1:{server.server_port}"], colocate_with=local)
        server.shutdown()


def test_the_commands_ask_remote_servers(
    model: Path,
    servers: list[Server],
    local: RliteInferenceEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["rlite", *arguments])
        capsys.readouterr()
        main()
        return capsys.readouterr().out

    rlite.shutdown()
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(4)))
    (tmp_path / "my.py").write_text(
        "def short(completions, **row): return [float(len(text) < 9) for text in completions]\n"
    )
    executor = ["executor=remote", f"executor_options.addresses=[{servers[0].url}]"]
    reward = [f"reward.path={tmp_path / 'my.py'}:short", "reward.in_process=true"]
    run("eval", str(model), f"data.path={rows}", *reward, *executor, "max_new_tokens=6", f"out={out}")
    assert KEY not in "".join(file.read_text(errors="replace") for file in out.rglob("*") if file.is_file())
    generate = ("generate", str(model), "hello", "temperature=0", "max_new_tokens=6", "chat=false")
    assert run(*generate, *executor) == run(*generate) != ""
    rows.write_text(rows.read_text() * 8)
    options = [f"train_data.path={rows}", *reward, f"actor.model_name={model}", f"trainer.save_dir={tmp_path / 'run'}"]
    with pytest.raises((ConfigError, SystemExit)) as refused:
        run("ppo", *options, *[f"rollout.{each}" for each in executor])
    assert "policy of its servers is fixed" in str(refused.value) + capsys.readouterr().err


def wait_until(holds: Any) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert holds()
