"""Prompts of `rlite ppo`: options of the chat template reach every workflow; tables are read in any known format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlite.assembly.quickstart.run import CHATML
from rlite.assembly.rl import read_prompts
from rlite.assembly.workflows import RunWorkflows
from rlite.data.rows import Rows
from rlite.errors import ConfigError
from rlite.rollout import GenerationHyperparameters, MultiTurnWorkflow, ScriptedEngine, SingleTurnWorkflow
from rlite.rollout.registry import REWARDS, WORKFLOWS, register_reward, register_workflow
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.trainer.options import SetSamplingOptions
from rlite.trainer.rl.options import PpoConfig
from tests.agents import tokenizer_with
from tests.integration.rewards import digits
from tests.tiny import build_model_dir

MESSAGES = [{"role": "user", "content": "q"}]
QUIET = "{% if enable_thinking is false and add_generation_prompt %}<think></think>{% endif %}"
ENVIRONMENT = """
async def step(state, action, extra_info):
    return {"next_state": None, "reward": 0.0, "score": 0.0, "done": True, "extra_info": extra_info}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = build_model_dir(tmp_path_factory.mktemp("models") / "qwen2", hidden=64, layers=1)
    tokenizer_with(CHATML + QUIET).save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def own_names() -> Iterator[None]:
    register_reward("digits")(digits)
    register_workflow("retries")(
        lambda gconfig, tokenizer, **options: MultiTurnWorkflow(digits, gconfig, tokenizer, **options)
    )
    register_workflow("fixed")(lambda gconfig, tokenizer: SingleTurnWorkflow(digits, gconfig, tokenizer))
    yield
    for table, names in ((REWARDS, ("digits",)), (WORKFLOWS, ("retries", "fixed"))):
        for name in names:
            del table[name]


def options(model: str, source: dict[str, Any], **data: Any) -> PpoConfig:
    return PpoConfig(actor={"model_name": model}, train_data=data, **source)  # type: ignore[arg-type]


def maker(options: PpoConfig) -> Callable[[Any], Any]:
    return RunWorkflows(options).maker(ChosenRewards(options.reward, {}) if options.reward else None, {})


@pytest.mark.parametrize("source", ["env_path", "reward", "workflow"])
def test_template_options_reach_training_and_evaluation(source: str, model: str, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    given: dict[str, Any] = {
        "env_path": {"rollout": {"env_path": str(tmp_path / "env.py")}},
        "reward": {"reward": {"path": "digits"}},
        "workflow": {"rollout": {"workflow": "retries"}},
    }
    asked = options(model, given[source], chat_template_options={"enable_thinking": False})
    make = maker(asked)
    for sampling in (asked.rollout.train_sampling_params, asked.rollout.sampling_of(SetSamplingOptions())):
        workflow = make(sampling)
        prompt = workflow.opening({"messages": MESSAGES})
        assert tokenizer_with().decode(prompt).endswith("<|im_start|>assistant\n<think></think>")


def test_every_turn_reads_a_prompt_with_the_options() -> None:
    tokenizer = tokenizer_with(CHATML + QUIET)
    prompts: list[str] = []

    def answer(request: Any) -> list[int]:
        prompts.append(tokenizer.decode(request.input_ids))
        return tokenizer("no<|im_end|>")["input_ids"]

    import asyncio

    gconfig = GenerationHyperparameters(max_new_tokens=8)
    workflow = MultiTurnWorkflow(
        lambda **_: 0.0, gconfig, tokenizer, max_turns=2, chat_template_options={"enable_thinking": False}
    )
    asyncio.run(workflow.arun_episode(ScriptedEngine(answer), {"messages": MESSAGES}))
    assert len(prompts) == 2
    assert prompts[1].count("<think></think>") == 2
    assert prompts[1].endswith("<think></think>")


def test_options_that_nothing_reads_are_refused(model: str) -> None:
    for source, given, message in (
        (
            {"rollout": {"workflow": "fixed"}},
            {"enable_thinking": False},
            "workflow has no parameter chat_template_options",
        ),
        (
            {"reward": {"path": "digits"}},
            {"enable_thinkin": False},
            "enable_thinkin: .* did you mean 'enable_thinking'",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            maker(options(model, source, chat_template_options=given))


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompts_of_any_format_are_mixed_and_evaluated_alike(model: str, tmp_path: Path) -> None:
    talks = write(tmp_path / "a.jsonl", [{"talk": [{"from": "human", "value": "q"}], "key": n} for n in range(3)])
    chats = write(tmp_path / "b.jsonl", [{"prompt": MESSAGES, "answer": n} for n in range(5)])
    asked = PpoConfig(
        actor={"model_name": model},  # type: ignore[arg-type]
        train_data={  # type: ignore[arg-type]
            "mixture": {
                "a": {"path": talks, "weight": 1, "columns": {"conversations": "talk", "answer": "key"}},
                "b": {"path": chats, "weight": 3},
            },
            "system_prompt": "s",
        },
        test_data={"path": chats},  # type: ignore[arg-type]
    )
    rows, test_rows = read_prompts(asked.train_data, asked.test_data)
    conversation = [{"role": "system", "content": "s"}, *MESSAGES]
    assert rows[0] == {"messages": conversation, "answer": 0}
    assert rows[3] == test_rows[""][0] == {"prompt": conversation, "answer": 0}
    assert isinstance(rows, Rows)
    assert rows.mixture is not None
    assert rows.mixture.counts == {"a": 2, "b": 6}
    assert (
        rows.form == "a mixture of a 25.0%, b 75.0%: a ShareGPT conversations (conversations); b chat prompts (prompt)"
    )
