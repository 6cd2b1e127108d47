"""Agents as workflows: sessions of their own, rewards, and failures that reach those they belong to."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import numpy as np
import openai
import pytest
import torch

from rlite.errors import ConfigError, DataError, WorkerDied
from rlite.rollout import CollectorOptions, GenerationHyperparameters, RolloutCollector, RolloutError
from rlite.rollout.openai import AgentEndpoint, AgentSession, AgentWorkflow
from tests.agents import Speaker, tokenizer_with

TOKENIZER = tokenizer_with()
BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}


def run(agent: Any, engine: Any = None, **options: Any) -> Any:
    workflow = AgentWorkflow(agent, GenerationHyperparameters(), TOKENIZER, **options)
    return asyncio.run(workflow.arun_episode(engine or Speaker(["yes"], TOKENIZER), {"question": "?"}))


async def twice(client: Any, data: dict[str, Any]) -> list[str]:
    return [(await client.chat.completions.create(**BODY)).id for _ in range(2)]


def test_an_agent_may_return_a_reward_or_rewards_by_interaction_or_set_them() -> None:
    async def one(client: Any, data: dict[str, Any]) -> float:
        await twice(client, data)
        return 1.0

    async def each(client: Any, data: dict[str, Any]) -> dict[str, float]:
        first, second = await twice(client, data)
        return {first: 0.25, second: 0.5}

    async def by_itself(client: Any, data: dict[str, Any]) -> None:
        await twice(client, data)
        client.set_last_reward(2)
        client.apply_reward_discount(0.5)

    async def nothing(client: Any, data: dict[str, Any]) -> None:
        await twice(client, data)

    rewards = {agent: run(agent, style="individual") for agent in (one, each, by_itself, nothing)}
    assert rewards[one]["rewards"].tolist() == [1.0, 1.0]
    assert rewards[each]["rewards"].tolist() == [0.75, 0.5]
    assert rewards[by_itself]["rewards"].tolist() == [1.0, 2.0]
    assert rewards[nothing] is None
    assert run(one, style="individual", turn_discount=None)["rewards"].tolist() == [0.0, 1.0]


def test_sampling_is_read_from_the_workflow_at_the_start_of_an_episode() -> None:
    async def once(client: Any, data: dict[str, Any]) -> float:
        await twice(client, data)
        return 1.0

    speaker = Speaker(["yes"], TOKENIZER)
    workflow = AgentWorkflow(once, {"max_tokens": 3}, TOKENIZER)
    workflow.gconfig = workflow.gconfig.new(max_new_tokens=2)
    asyncio.run(workflow.arun_episode(speaker, {"question": "?"}))
    assert [len(answer) for _, answer in speaker.asked] == [2, 2]


@pytest.mark.parametrize("worth", [np.float32(0.5), np.array([0.5]), torch.tensor(0.5)])
def test_a_reward_may_be_an_array_or_a_tensor_of_one_element_as_that_of_a_reward_function_may(worth: Any) -> None:
    async def of_the_whole(client: Any, data: dict[str, Any]) -> Any:
        await twice(client, data)
        return worth

    async def of_one(client: Any, data: dict[str, Any]) -> Any:
        return {(await twice(client, data))[0]: worth}

    assert run(of_the_whole, style="individual")["rewards"].tolist() == [0.5, 0.5]
    assert run(of_one, style="individual")["rewards"].tolist() == [0.5, 0.0]


def test_an_agent_that_returns_nonsense_is_told_so() -> None:
    async def text(client: Any, data: dict[str, Any]) -> Any:
        await twice(client, data)
        return "good"

    async def idle(client: Any, data: dict[str, Any]) -> float:
        return 1.0

    async def not_a_number(client: Any, data: dict[str, Any]) -> Any:
        await twice(client, data)
        return float("nan")

    with pytest.raises(DataError, match="the agent returned 'good'"):
        run(text)
    with pytest.raises(DataError, match="the agent returned nan; expected a finite reward"):
        run(not_a_number)
    with pytest.raises(RolloutError, match="asked the model for nothing"):
        run(idle)
    with pytest.raises(ConfigError, match="interface='grpc'"):
        run(idle, interface="grpc")
    with pytest.raises(ConfigError, match=r"turn_discount=2: expected a number in \[0, 1\]"):
        run(idle, turn_discount=2)
    with pytest.raises(ConfigError, match=r"AgentWorkflow\('me'\): expected an async function"):
        run("me")
    with pytest.raises(ConfigError, match=r"returned 0\.5 and nothing to await: expected an async function"):
        run(lambda client, data: 0.5)
    with pytest.raises(ConfigError, match="tool call format 'hermse': did you mean 'hermes'"):
        AgentWorkflow(idle, GenerationHyperparameters(), TOKENIZER, tool_format="hermse")


@pytest.mark.parametrize(("interface", "package"), [("client", "openai"), ("http", "aiohttp")])
def test_a_package_that_is_missing_is_named_with_its_extra(
    interface: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("rlite.services.endpoint.client", "rlite.services.endpoint.endpoint"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs the package {package}: pip install 'rlite\[agents\]'"):
        AgentWorkflow(twice, GenerationHyperparameters(), TOKENIZER, interface=interface)  # type: ignore[arg-type]


@pytest.mark.parametrize("interface", ["client", "http"])
def test_requests_of_an_ended_agent_end_and_do_not_count(interface: str) -> None:
    left: list[asyncio.Task[Any]] = []

    async def hasty(model: Any, data: dict[str, Any]) -> float:
        client = model
        if interface == "http":
            client = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)
        client = client.with_options(max_retries=0)
        left.append(asyncio.create_task(client.chat.completions.create(**BODY)))
        await client.chat.completions.create(**BODY, max_tokens=1)
        return 1.0

    engine = Speaker(["a long answer"], TOKENIZER, latency=0.0)
    engine._latency = lambda request: 0.02 if request.gconfig.max_new_tokens == 1 else 30.0

    async def episode() -> Any:
        workflow = AgentWorkflow(hasty, GenerationHyperparameters(), TOKENIZER, interface=interface)  # type: ignore[arg-type]
        batch = await workflow.arun_episode(engine, {})
        with pytest.raises(openai.APIError):
            await left[0]
        return batch

    batch = asyncio.run(asyncio.wait_for(episode(), 200))
    assert batch["num_turns"].tolist() == [1]
    assert batch["loss_mask"].sum().item() == 1


def test_an_engine_that_dies_is_the_engines_failure_not_the_agents() -> None:
    def die(request: Any) -> list[int]:
        raise WorkerDied("worker 0 is gone", ("worker 0",))

    async def stubborn(client: Any, data: dict[str, Any]) -> float:
        with pytest.raises(openai.InternalServerError, match="worker 0 is gone"):
            await client.with_options(max_retries=0).chat.completions.create(**BODY)
        return 1.0

    engine = Speaker([""], TOKENIZER)
    engine._answer = die
    with pytest.raises(WorkerDied, match="worker 0 is gone"):
        run(stubborn, engine)


def test_an_engine_that_aborts_lets_the_client_ask_again_and_counts_once() -> None:
    class Interrupted(Speaker):
        def _next(self, request: Any) -> Any:
            answer = super()._next(request)
            return ([65], 0.0, "abort") if self.num_requests == 1 else answer

    async def agent(client: Any, data: dict[str, Any]) -> float:
        with pytest.raises(openai.InternalServerError, match="aborted the answer after 1 tokens"):
            await client.with_options(max_retries=0).chat.completions.create(**BODY)
        await client.chat.completions.create(**BODY)
        return 1.0

    batch = run(agent, Interrupted(["yes"], TOKENIZER))
    assert batch["num_turns"].tolist() == [1]
    assert batch["loss_mask"].sum().item() == 4


def test_an_engine_that_fails_within_a_stream_ends_the_stream_with_an_error() -> None:
    class Breaking(Speaker):
        async def stream(self, request: Any) -> Any:
            async for chunk in super().stream(request):
                yield chunk
                raise WorkerDied("worker 0 is gone", ("worker 0",))

    async def use() -> AgentSession:
        session = AgentSession(Breaking(["yes"], TOKENIZER), TOKENIZER)
        async with (
            AgentEndpoint() as endpoint,
            endpoint.serving(session) as access,
            openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client,
        ):
            stream = await client.chat.completions.create(**BODY, stream=True)
            with pytest.raises(openai.APIError, match="worker 0 is gone"):
                async for _ in stream:
                    pass
        return session

    session = asyncio.run(use())
    assert isinstance(session.failure, WorkerDied)
    assert not session.recording.completed()


@pytest.mark.parametrize("interface", ["client", "http"])
def test_a_collector_runs_agents_side_by_side_and_leaves_no_socket(interface: str) -> None:
    async def agent(model: Any, data: dict[str, Any]) -> float:
        client = model
        if interface == "http":
            assert model.api_key not in repr(model)
            client = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)
        await twice(client, data)
        if interface == "http":
            await client.close()
        return float(data["number"])

    def num_sockets() -> int:
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return sum(os.readlink(link).startswith("socket") for link in links if os.path.islink(link))

    workflow = AgentWorkflow(agent, GenerationHyperparameters(), TOKENIZER, interface=interface)  # type: ignore[arg-type]
    collector = RolloutCollector(Speaker(["yes"], TOKENIZER, latency=0.01), CollectorOptions())
    before = num_sockets()
    batch = collector.rollout_batch([{"number": number} for number in range(3)], workflow, group_size=2)
    collector.close()
    # the same question twice is two conversations
    assert batch["rewards"].tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    assert batch["sequence_index"].tolist() == [0, 1] * 6
    assert num_sockets() <= before
