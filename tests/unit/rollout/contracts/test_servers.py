from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlite.errors import DataError
from rlite.rollout import EnvironmentFailure, EnvironmentRaised, GymWorkflow, ScriptedEngine
from rlite.rollout.contracts import (
    OpenEnv,
    OpenEnvTools,
    OrsEnvironment,
    ToolEnvironmentWorkflow,
    from_openenv,
)
from rlite.rollout.episode import Episode, running
from tests.unit.rollout.contracts.servers import openenv_app, ors_app, serving
from tests.unit.rollout.contracts.tool_template import TOKENIZER, called, said, text_of

SAMPLING = {"max_new_tokens": 200}


async def played(app: Any, environment: Any, answers: list[list[int]], item: dict[str, Any], kind: Any) -> Any:
    async with serving(app) as url:
        workflow = kind(environment(url), SAMPLING, TOKENIZER, max_turns=4)
        return await workflow.arun_episode(ScriptedEngine(answers), item)


def test_texts_are_actions_of_an_openenv_server() -> None:
    sessions: list[list[Any]] = []
    item = {"seed": 7, "env_options": {"level": 2}}
    rows = asyncio.run(played(openenv_app(sessions), OpenEnv, [said("hello"), said("bye")], item, GymWorkflow))
    assert rows["rewards"].tolist() == [8.0]
    assert "seed 7" in text_of(rows)
    assert "you said hello" in text_of(rows)
    assert sessions[0][0] == {"type": "reset", "data": {"seed": 7, "level": 2}}
    assert sessions[0][-1] == {"type": "close"}


def test_mcp_tools_of_an_openenv_server_are_tools_of_the_model() -> None:
    item = {"prompt": [{"role": "user", "content": "Add."}]}
    answers = [called("add", number=4), called("add", number=3), said("done")]
    rows = asyncio.run(played(openenv_app([]), OpenEnvTools, answers, item, ToolEnvironmentWorkflow))
    assert rows["rewards"].tolist() == [7.0]


def test_an_error_of_the_server_is_a_failure_with_its_reason() -> None:
    with pytest.raises(EnvironmentRaised, match="EXECUTION_ERROR"):
        asyncio.run(played(openenv_app([]), OpenEnv, [said("break")], {"seed": 0}, GymWorkflow))


def test_a_server_that_is_not_there_is_a_failure_of_the_environment() -> None:
    workflow = GymWorkflow(OpenEnv("http://127.0.0.1:9", action="text", timeout=5.0), SAMPLING, TOKENIZER)
    with pytest.raises(EnvironmentFailure, match=r"127\.0\.0\.1:9"):
        asyncio.run(workflow.arun_episode(ScriptedEngine([said("x")]), {"seed": 0}))


def test_calls_of_an_ors_server_give_the_reward_and_end_the_episode() -> None:
    deleted: list[str] = []
    answers = [called("answer"), called("answer", text="4")]
    app = ors_app(deleted, compares=False)
    rows = asyncio.run(played(app, OrsEnvironment, answers, {"task": 3}, ToolEnvironmentWorkflow))
    assert rows["rewards"].tolist() == [1.0]
    assert rows["num_turns"].tolist() == [2]
    assert "task 1" in text_of(rows)  # the fourth of two tasks
    assert deleted == ["s0"]


def test_an_ors_server_compares_the_episodes_of_a_group() -> None:
    async def group() -> list[float]:
        siblings: list[Episode] = []
        siblings += (Episode(0.0, siblings) for _ in range(3))
        async with serving(ors_app([], compares=True)) as url:
            environment = OrsEnvironment(url)
            workflow = ToolEnvironmentWorkflow(environment, SAMPLING, TOKENIZER)

            async def one(episode: Episode) -> float:
                with running(episode):
                    rows = await workflow.arun_episode(ScriptedEngine([called("answer", text="4")]), {"seed": 0})
                return rows["rewards"].item()

            return await asyncio.gather(*map(one, siblings))

    assert asyncio.run(group()) == [0.5, 10.5, 20.5]


def test_a_row_without_a_task_is_refused_in_its_words() -> None:
    with pytest.raises(DataError, match="expected task"):
        asyncio.run(played(ors_app([], False), OrsEnvironment, [], {"prompt": "p"}, ToolEnvironmentWorkflow))


def turn(number: int, prompt: list[int], said: list[int], mask: list[int] | None = None) -> dict[str, Any]:
    masks = [0] * len(prompt) + (mask or [1] * len(said))
    values = [-0.5] * len(said)
    ids = {"prompt_token_ids": prompt, "completion_token_ids": said}
    return {"node_id": str(number), **ids, "per_token_logps": values, "loss_mask": masks}


def test_a_captured_trace_becomes_a_row_for_each_line_and_trains_each_turn_once() -> None:
    turns = [turn(1, [1, 2], [3, 4]), turn(2, [1, 2, 3, 4, 5], [6]), turn(3, [1, 2, 3, 4, 7], [8, 9], [1, 0])]
    rows = from_openenv({"schema_version": 1, "turns": turns}, reward=0.25, version=3)
    assert rows["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 0], [1, 2, 3, 4, 7, 8, 9]]
    assert rows["loss_mask"].int().tolist() == [[0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1, 0]]
    assert rows["rewards"].tolist() == [0.25, 0.25]
    assert rows["versions"][0].tolist() == [-1, -1, 3, 3, -1, 3, -1]


@pytest.mark.parametrize("trace", [{"turns": []}, {"schema_version": 2, "turns": [1]}, [1]])
def test_a_trace_of_another_form_is_refused(trace: Any) -> None:
    with pytest.raises(DataError, match="expected a TrainingTrace"):
        from_openenv(trace, reward=1.0)
