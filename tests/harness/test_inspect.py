"""A task of Inspect AI against the endpoint, without a network."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, eval_async
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import match
from inspect_ai.solver import generate, system_message

from rlite import RliteInferenceEngine
from rlite.rollout.openai import AgentEndpoint, AgentSession

SYSTEM = "Be brief."


def answer(engine: RliteInferenceEngine, question: str) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return engine.chat(messages, {"temperature": 0.0, "max_tokens": 12}).text


async def evaluated(engine: RliteInferenceEngine, data: Path, logs: Path) -> Any:
    session = AgentSession(engine, engine.tokenizer, is_recording=False)
    task = Task(
        dataset=json_dataset(str(data)), solver=[system_message(SYSTEM), generate()], scorer=match(location="exact")
    )
    async with AgentEndpoint() as endpoint, endpoint.serving(session) as access:
        [log] = await eval_async(
            task,
            model=f"openai-api/rlite/{access.model}",
            model_base_url=access.base_url,
            model_args={"api_key": access.api_key},
            temperature=0.0,
            max_tokens=12,
            log_dir=str(logs),
        )
        return log


def test_a_task_is_scored_by_the_models_own_answers(engine: RliteInferenceEngine, tmp_path: Path) -> None:
    questions = ["1+2?", "Say more.", "Who?", "naïve"]
    rows = [{"input": each, "target": answer(engine, each)} for each in questions]
    rows[-1]["target"] = "something that the model does not say"
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = asyncio.run(evaluated(engine, data, tmp_path / "logs"))
    assert log.status == "success", log.error
    assert [sample.output.completion for sample in log.samples] == [answer(engine, each) for each in questions]
    assert {sample.output.usage.output_tokens > 0 for sample in log.samples} == {True}
    assert log.results.scores[0].metrics["accuracy"].value == pytest.approx(0.75)
    assert list((tmp_path / "logs").glob("*.eval"))
