"""With the real OpenEnv: `make test-doors`."""

from __future__ import annotations

import asyncio
import runpy
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlite.rollout import EnvironmentRaised, GymWorkflow, ScriptedEngine
from rlite.rollout.contracts import OpenEnv, OpenEnvTools, ToolEnvironmentWorkflow, from_openenv
from tests.doors.learning import check_learning, tiny_model
from tests.doors.programs import FOLDER, make_model, train
from tests.unit.rollout.contracts.tool_template import TOKENIZER, called, said, text_of

core = pytest.importorskip("openenv.core", reason="make test-doors installs it")
SAMPLING = {"max_new_tokens": 64}


def serve(app: Any) -> Iterator[str]:
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    from openenv.core.env_server import Action, Environment, Observation, State, create_app

    class Say(Action):
        message: str

    class Heard(Observation):
        text: str = ""

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
            return Heard(text=f"Say many e, {seed}.", reward=0.0, done=False)

        def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
            if action.message == "break":
                raise ValueError("cannot hear")
            share = action.message.count("e") / max(len(action.message), 1)
            return Heard(text="heard", reward=share, done=True)

        @property
        def state(self) -> State:
            return State()

    yield from serve(create_app(Echo, Say, Heard, env_name="echo", max_concurrent_envs=256))


def test_a_server_of_texts_plays_and_rewards_an_episode(echo: str) -> None:
    workflow = GymWorkflow(OpenEnv(echo), SAMPLING, TOKENIZER, max_turns=2)
    rows = asyncio.run(workflow.arun_episode(ScriptedEngine([said("eeet")]), {"seed": 3}))
    assert rows["rewards"].tolist() == [0.75]
    assert "Say many e, 3." in text_of(rows)


def test_an_error_of_the_environment_fails_the_episode_with_its_reason(echo: str) -> None:
    workflow = GymWorkflow(OpenEnv(echo), SAMPLING, TOKENIZER)
    with pytest.raises(EnvironmentRaised, match="cannot hear"):
        asyncio.run(workflow.arun_episode(ScriptedEngine([said("break")]), {"seed": 3}))


def test_tools_of_an_mcp_server_are_called() -> None:
    from fastmcp import FastMCP
    from openenv.core.env_server import Observation, State, create_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    server = FastMCP("sum")

    @server.tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    class Sum(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__(server)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
            return Observation(done=False, reward=0.0)

        def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
            return Observation(done=False, reward=0.0)

        @property
        def state(self) -> State:
            return State()

    for url in serve(create_app(Sum, CallToolAction, CallToolObservation, env_name="sum", max_concurrent_envs=8)):
        workflow = ToolEnvironmentWorkflow(OpenEnvTools(url), {"max_new_tokens": 200}, TOKENIZER)
        item = {"prompt": [{"role": "user", "content": "2+3?"}]}
        rows = asyncio.run(workflow.arun_episode(ScriptedEngine([called("add", a=2, b=3), said("5")]), item))
        assert rows["num_tool_calls"].tolist() == [1]
        assert rows["num_tool_errors"].tolist() == [0]
        assert "<tool_response>5</tool_response>" in text_of(rows)


def test_a_training_trace_becomes_rows() -> None:
    from openenv.core.harness.training import TrainingTrace, TrainingTurn

    ids = {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "per_token_logps": [-0.5, -0.25]}
    trace = TrainingTrace(turns=[TrainingTurn(node_id="a", loss_mask=[0, 0, 1, 1], **ids)])
    rows = from_openenv(trace, reward=1.0, version=2)
    assert rows["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert rows["logprobs"].tolist() == [[0.0, 0.0, -0.5, -0.25]]


def test_the_example_trains_on_its_server(tmp_path: Path) -> None:
    app = runpy.run_path(str(FOLDER / "openenv_echo.py"))["app"]
    for url in serve(app):
        train("openenv_echo", make_model(tmp_path / "model"), tmp_path, url)


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_held_out_rewards_rise(tmp_path: Path, echo: str) -> None:
    rows, held_out = ([{"seed": seed} for seed in numbers] for numbers in (range(64), range(1000, 1016)))
    check_learning(tmp_path, tiny_model(tmp_path), rows, held_out, env_path=f"openenv:{echo}")
