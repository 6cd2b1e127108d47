"""With the real server of openreward: `make test-doors`."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rlite.rollout import CollectorOptions, RolloutCollector, ScriptedEngine
from rlite.rollout.contracts import OrsEnvironment, ToolEnvironmentWorkflow
from tests.doors.learning import check_learning, tiny_model
from tests.doors.programs import FOLDER, make_model, train
from tests.unit.rollout.contracts.tool_template import TEMPLATE, TOKENIZER, called, said, text_of

environments = pytest.importorskip("openreward.environments", reason="make test-doors installs it")
SAMPLING = {"max_new_tokens": 200}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    import uvicorn
    from openreward.environments import Server

    from tests.doors.letters import Letters, Ranked

    app = Server([Letters, Ranked]).app
    with socket.create_server(("127.0.0.1", 0)) as listening:
        running = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not running.started:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        running.should_exit = True
        thread.join(10)


def test_a_call_gives_the_reward_and_ends_the_episode(server: str) -> None:
    workflow = ToolEnvironmentWorkflow(OrsEnvironment(server), SAMPLING, TOKENIZER)
    rows = asyncio.run(workflow.arun_episode(ScriptedEngine([called("answer", text="eeet")]), {"task": 5}))
    assert rows["rewards"].tolist() == [0.75]
    assert "Say many e, train1." in text_of(rows)


def test_a_plain_answer_goes_to_the_terminal_tool(server: str) -> None:
    workflow = ToolEnvironmentWorkflow(OrsEnvironment(server, split="test"), SAMPLING, TOKENIZER)
    rows = asyncio.run(workflow.arun_episode(ScriptedEngine([said("et")]), {"task": 0}))
    assert rows["rewards"].tolist() == [0.5]


def test_a_wrong_call_is_told_to_the_model(server: str) -> None:
    workflow = ToolEnvironmentWorkflow(OrsEnvironment(server), SAMPLING, TOKENIZER)
    answers = [called("answer", number=1), called("answer", text="e")]
    rows = asyncio.run(workflow.arun_episode(ScriptedEngine(answers), {"task": 0}))
    assert rows["num_tool_errors"].tolist() == [1]
    assert rows["rewards"].tolist() == [1.0]


def test_the_scores_of_a_group_are_added(server: str) -> None:
    environment = OrsEnvironment(server, environment="ranked")
    workflow = ToolEnvironmentWorkflow(environment, SAMPLING, TOKENIZER)
    with closing(RolloutCollector(ScriptedEngine([called("answer", text="e")]), CollectorOptions())) as collector:
        batch = collector.rollout_batch([{"task": 0}], workflow, group_size=3)
    assert batch["rewards"].tolist() == [1.0, 11.0, 21.0]


def test_the_example_trains_on_its_server(tmp_path: Path) -> None:
    server = subprocess.Popen([sys.executable, str(FOLDER / "ors_quiz.py"), "serve"])
    try:
        wait_for("http://localhost:8080/health", server)
        train("ors_quiz", make_model(tmp_path / "model"), tmp_path, "http://localhost:8080")
    finally:
        server.kill()
        server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Return when a server answers."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(url):
                return
        except urllib.error.URLError:
            time.sleep(0.1)
    pytest.fail("the server has ended")


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_held_out_rewards_rise(tmp_path: Path, server: str) -> None:
    rows, held_out = ([{"task": place} for place in numbers] for numbers in (range(3), range(3, 4)))
    check_learning(tmp_path, tiny_model(tmp_path, TEMPLATE), rows, held_out, env_path=f"ors:{server}")
