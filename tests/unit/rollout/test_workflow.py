from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from rlite.assembly.quickstart.run import CHATML, byte_tokenizer
from rlite.data.readers.columns import normalise
from rlite.data.sft import sft_rows
from rlite.data.source import Source
from rlite.errors import DataError
from rlite.rollout import (
    GenerationHyperparameters,
    LLMRequest,
    LLMResponse,
    RewardFunction,
    RolloutCollector,
    RolloutError,
    RolloutWorkflow,
    ScriptedEngine,
    SingleTurnWorkflow,
    trajectory,
)
from rlite.rollout.conversation import Conversation
from rlite.rollout.rewards.configured_rewards import adapt
from rlite.rollout.rewards.weighted import Part, WeightedRewards
from rlite.rollout.workflow import prompt_ids, prompt_text
from rlite.types import OnChunk
from tests.agents import tokenizer_with
from tests.tiny import tokenizer_with_bos

TOKENIZER = byte_tokenizer()
GCONFIG = GenerationHyperparameters(max_new_tokens=8)


def echo(request: LLMRequest) -> list[int]:
    return request.input_ids[:2]


def workflow(seen: list[dict[str, Any]] | None = None) -> SingleTurnWorkflow:
    def reward(**call: Any) -> float:
        if seen is not None:
            seen.append(call)
        return 0.5

    return SingleTurnWorkflow(RewardFunction(reward, in_process=True), GCONFIG, TOKENIZER)


def test_a_trajectory_marks_what_was_generated() -> None:
    response = LLMResponse(
        input_tokens=[4, 5],
        output_tokens=[6, 7, 8],
        output_logprobs=[-1.0, -2.0, -3.0],
        output_versions=[1, 1, 2],
        stop_reason="length",
        latency=0.1,
        ttft=0.1,
    )
    row = trajectory(response, reward=0.25)
    assert row.batch_size == (1,)
    assert row["input_ids"].tolist() == [[4, 5, 6, 7, 8]]
    assert row["attention_mask"].tolist() == [[True] * 5]
    assert row["loss_mask"].tolist() == [[False, False, True, True, True]]
    assert row["logprobs"].tolist() == [[0.0, 0.0, -1.0, -2.0, -3.0]]
    assert row["versions"].tolist() == [[-1, -1, 1, 1, 2]]
    assert row["rewards"].tolist() == [0.25]
    assert row["truncated"].tolist() == [True]
    assert "rewards" not in trajectory(response)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"input_ids": [72, 105]}, None),
        ({"prompt": "2+2="}, "2+2="),
        (
            {"messages": [{"role": "user", "content": "2+2="}]},
            "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n",
        ),
        ({"prompt": [{"role": "user", "content": "?"}]}, "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_prompts_are_token_ids_messages_or_text(item: dict[str, Any], text: str | None) -> None:
    expected = item["input_ids"] if text is None else TOKENIZER(text, add_special_tokens=False)["input_ids"]
    row = asyncio.run(workflow().arun_episode(ScriptedEngine(echo), item))
    assert row["input_ids"].tolist() == [expected + expected[:2]]
    assert row["rewards"].tolist() == [0.5]


def test_the_reward_sees_text_tokens_and_the_items_keys() -> None:
    seen: list[dict[str, Any]] = []
    item = {"prompt": "2+2=", "answer": 4}
    asyncio.run(workflow(seen).arun_episode(ScriptedEngine(echo), item))
    ids = TOKENIZER("2+2=")["input_ids"]
    assert seen == [{"prompt": "2+2=", "completions": "2+", "prompt_ids": ids, "completion_ids": ids[:2], "answer": 4}]


@pytest.mark.parametrize("prompt", ["2+2=", "<|endoftext|>2+2="])
def test_a_raw_prompt_is_asked_as_it_is_learnt(prompt: str) -> None:
    seen: list[dict[str, Any]] = []
    tokenizer = tokenizer_with_bos()
    asking = workflow(seen)
    asking.tokenizer = tokenizer
    row = asyncio.run(asking.arun_episode(ScriptedEngine([[9, tokenizer.eos_token_id]]), {"prompt": prompt}))
    taught = sft_rows([{"prompt": prompt, "response": tokenizer.decode([9])}], tokenizer, 64).batch([0])
    assert row["input_ids"].tolist() == taught["input_ids"].tolist()
    assert row["input_ids"][0, :2].tolist() == [tokenizer.bos_token_id, TOKENIZER("2")["input_ids"][0]]
    assert seen[0]["prompt"] == prompt


def test_an_item_without_a_prompt_is_refused_with_its_keys() -> None:
    with pytest.raises(DataError, match=r"the item has the keys \['answer', 'question'\] and no prompt"):
        asyncio.run(workflow().arun_episode(ScriptedEngine(echo), {"question": "2+2=", "answer": 4}))


def test_a_conversation_that_the_chat_template_refuses_is_an_error_of_the_item() -> None:
    asking = workflow()
    asking.tokenizer = byte_tokenizer()
    asking.tokenizer.chat_template = "{% for m in messages %}{{ raise_exception('no ' + m.role) }}{% endfor %}"
    item = {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}
    refused = "the model's chat template refuses a conversation of the roles system, user: no system"
    for ask in (lambda: asyncio.run(asking.arun_episode(ScriptedEngine(echo), item)), lambda: asking.opening(item)):
        with pytest.raises(DataError, match=refused):
            ask()


def test_an_aborted_completion_is_not_trained_on() -> None:
    class AbortingEngine(ScriptedEngine):
        async def agenerate(self, request: LLMRequest, on_chunk: OnChunk | None = None) -> LLMResponse:
            response = await super().agenerate(request)
            return LLMResponse(**{**vars(response), "stop_reason": "abort"})

    with pytest.raises(RolloutError, match="aborted the completion after 2 tokens"):
        asyncio.run(workflow().arun_episode(AbortingEngine(echo), {"prompt": "2+2="}))


def test_sampling_parameters_may_be_a_mapping_in_either_spelling() -> None:
    asking = SingleTurnWorkflow(RewardFunction(echo, in_process=True), {"max_tokens": 3}, TOKENIZER)
    assert asking.gconfig == GenerationHyperparameters(max_new_tokens=3)


def test_a_workflow_that_is_no_async_function_is_told_what_to_write() -> None:
    class Plain(RolloutWorkflow):
        def arun_episode(self, engine: Any, data: Any) -> Any:
            return None

    collector = RolloutCollector(ScriptedEngine(echo))
    try:
        with pytest.raises(RolloutError, match=r"Plain.arun_episode returned None: write `async def arun_episode`"):
            collector.rollout_batch([{"input_ids": [1]}], Plain())
    finally:
        collector.close()


def test_a_reward_reads_no_end_token_that_is_not_special() -> None:
    seen: list[dict[str, Any]] = []
    end, said = TOKENIZER(";")["input_ids"], TOKENIZER("yes;")["input_ids"]
    for ends, text in ((end, "yes"), ((), "yes;")):
        row = asyncio.run(workflow(seen).arun_episode(ScriptedEngine([said], end_ids=ends), {"prompt": "?"}))
        assert (seen[-1]["completions"], seen[-1]["completion_ids"]) == (text, said)
        assert row["input_ids"][0, 1:].tolist() == said


# -- columns whose names are those of parameters -----------------------------------------------------------------------

COLUMNS = {
    name: f"own {name}"
    for name in (
        *("self", "cls", "fn", "data", "engine", "task", "timeout", "item", "row", "rows", "what", "weight", "args"),
        *(
            "kwargs",
            "keywords",
            "arguments",
            "columns",
            "value",
            "function",
            "prompts",
            "is_batch",
            "reward_fn",
            "read",
        ),
        *("gconfig", "tokenizer", "limit", "name", "key", "finish", "parts", "method", "memory", "state", "action"),
    )
}


def own_of_all(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    return float(sum(data[name] == value for name, value in COLUMNS.items()))


def trls(completions: list[str], **data: Any) -> list[float]:
    own = sum(data[name] == [value] for name, value in COLUMNS.items() if name != "prompts")
    return [float(own + (data["prompts"] == ["ab"]))]


def verls(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return float(len(COLUMNS) * (ground_truth == "4"))


@pytest.mark.parametrize("in_process", [True, False], ids=["here", "process"])
@pytest.mark.parametrize("fn", [own_of_all, trls, verls])
@pytest.mark.parametrize("kind", ["one", "batch", "weighted"])
def test_columns_may_be_named_like_parameters(fn: Callable[..., Any], in_process: bool, kind: str) -> None:
    adapted, size = adapt(fn, "reward"), None
    if kind == "batch" and fn is own_of_all:
        size = 4

        def lists(completions: list[str], **data: Any) -> list[float]:
            return [float(sum(data[name] == [value] for name, value in COLUMNS.items()))]

        reward: Any = RewardFunction(lists, in_process=in_process, batch_size=size, batch_wait=0.0)
    else:
        reward = RewardFunction(adapted.fn, in_process=in_process)
    if kind == "weighted":
        reward = WeightedRewards({"one": Part(reward, 1.0)})
    asking = SingleTurnWorkflow(reward, GCONFIG, TOKENIZER)
    item = {"prompt": "ab", **COLUMNS, "ground_truth": "4"}
    row = asyncio.run(asking.arun_episode(ScriptedEngine(echo), item))
    assert row["rewards"].tolist() == [len(COLUMNS)]


# -- tools of an item --------------------------------------------------------------------------------------------------

TOOLED = CHATML.replace("{% for", "{% if tools %}{{ tools | tojson }}{% endif %}{% for", 1)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.mark.parametrize("prompt", ["messages", "prompt"])
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])]], ids=["list", "text", "texts"])
def test_the_tools_of_an_item_are_in_its_prompt(prompt: str, tools: Any) -> None:
    tokenizer = tokenizer_with(TOOLED)
    [item], _ = normalise([{prompt: [{"role": "user", "content": "q"}], "tools": tools}], "prompts", Source("x"))
    assert prompt_text(item, tokenizer).startswith(json.dumps(TOOLS))
    assert tokenizer.decode(prompt_ids(item, tokenizer)) == prompt_text(item, tokenizer)
    assert Conversation(tokenizer, item).prompt == prompt_text(item, tokenizer)
    assert "add" not in prompt_text(item, tokenizer, {"tools": [{"name": "other"}]})


@pytest.mark.parametrize("tools", [["add"], "calculator", [], {"add": 1}, None])
def test_another_column_named_tools_is_the_rewards(tools: Any) -> None:
    [item], _ = normalise([{"messages": [{"role": "user", "content": "q"}], "tools": tools}], "prompts", Source("x"))
    assert item["tools"] == tools
    assert "add" not in prompt_text(item, tokenizer_with(TOOLED))
