"""Agents as others write them, with the official clients unmodified: held-out rewards rise."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from rlite.rollout.openai import AgentWorkflow
from rlite.rollout.registry import register_workflow
from tests.doors.learning import HELD_OUT, ROWS, check_learning, share_of, tiny_model

MORE = {"role": "user", "content": "More!"}


def question(row: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": f"Say many e, {row['number']}."}


async def answer_twice_by_responses(access: Any, row: dict[str, Any]) -> float:
    async with openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
        items: list[Any] = [question(row)]
        first = await client.responses.create(model=access.model, input=items)
        second = await client.responses.create(model=access.model, input=[*items, *first.output, MORE])
        return share_of("e", first.output_text, second.output_text)


async def answer_twice_by_messages(access: Any, row: dict[str, Any]) -> float:
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=access.root, api_key=access.api_key) as client:
        messages: list[Any] = [question(row)]
        first = await client.messages.create(model=access.model, messages=messages, max_tokens=8)
        messages += [{"role": "assistant", "content": first.content}, MORE]
        second = await client.messages.create(model=access.model, messages=messages, max_tokens=8)
        return share_of("e", *(block.text for said in (first, second) for block in said.content))


async def ask_sub_agents(client: openai.AsyncOpenAI, row: dict[str, Any]) -> float:
    async def ask(*messages: Any) -> Any:
        return (await client.chat.completions.create(model="policy", messages=[*messages])).choices[0].message

    plan = await ask(question(row))
    branches = [[question(row), plan, {"role": "user", "content": text}] for text in ("More!", "Less!")]
    reports = await asyncio.gather(*(ask(*branch) for branch in branches))
    return share_of("e", *(message.content for message in (plan, *reports)))


@pytest.mark.parametrize(
    ("agent", "interface"),
    [(answer_twice_by_responses, "http"), (answer_twice_by_messages, "http"), (ask_sub_agents, "client")],
)
@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_held_out_rewards_of_an_agent_rise(tmp_path: Path, agent: Any, interface: Any) -> None:
    if agent is answer_twice_by_messages:
        pytest.importorskip("anthropic")
    register_workflow(agent.__name__)(lambda *given: AgentWorkflow(agent, *given, interface=interface))
    check_learning(tmp_path, tiny_model(tmp_path), ROWS, HELD_OUT, workflow=agent.__name__)
