"""Agents that others wrote against a real model: OpenAI's clients, and pydantic-ai with its trajectory trained on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from accelerate import init_empty_weights
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.algorithms import LossInputs, group_advantages, masked_mean, next_token, on_logprobs, ppo_clip
from rlite.nn import HuggingFaceFsdp2TrainModule
from rlite.rollout import GenerationHyperparameters
from rlite.rollout.openai import AgentClient, AgentEndpoint, AgentSession, AgentWorkflow
from tests.agents import ADD, WITH_TOOLS, Speaker, tokenizer_with
from tests.tiny import build_model_dir

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
QUESTION = {"role": "user", "content": "1+2?"}
TOKENIZER = tokenizer_with(WITH_TOOLS)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def framework(client: openai.AsyncOpenAI, data: dict[str, Any]) -> float:
    """An agent of pydantic-ai."""
    model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
    result = await Agent(model, tools=[add], instructions="Use the tools.").run(data["question"])
    return float("3" in result.output)


async def framework_over_http(access: Any, data: dict[str, Any]) -> float:
    async with openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
        return await framework(client, data)


async def conversation(client: openai.AsyncOpenAI, data: dict[str, Any]) -> float:
    """An agent by hand: a call, its result, an answer, a further question."""
    messages: list[Any] = [QUESTION]
    first = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])  # type: ignore[list-item]
    [call] = first.choices[0].message.tool_calls or []
    result = add(**json.loads(call.function.arguments))  # type: ignore[union-attr]
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": str(result)}]
    for question in ("And?", ""):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])  # type: ignore[list-item]
        messages += [answer.choices[0].message, {"role": "user", "content": question}]
    return float("done" in (answer.choices[0].message.content or ""))


def teach(path: Path, batches: list[Any], max_steps: int = 300) -> None:
    """Train the checkpoint to say what is marked in the batches."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(max_steps):
        losses = []
        for batch in batches:
            logits = model(batch["input_ids"]).logits[:, :-1]
            mask = batch["loss_mask"][:, 1:]
            loss = torch.nn.functional.cross_entropy(logits[mask], batch["input_ids"][:, 1:][mask])
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if max(losses) < 0.02:
            break
    assert max(losses) < 0.02
    model.save_pretrained(path)


def episode(agent: Any, engine: Any, **options: Any) -> Any:
    gconfig = GenerationHyperparameters(greedy=True, max_new_tokens=80)
    workflow = AgentWorkflow(agent, gconfig, TOKENIZER, **options)
    return asyncio.run(workflow.arun_episode(engine, {"question": "1+2?"}))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can hold the two conversations."""
    path = build_model_dir(tmp_path_factory.mktemp("agent") / "model", "qwen3", hidden=64, initializer_range=0.05)
    scripts = {framework: [CALL, "It is 3."], conversation: [CALL, "It is 3.", "I am done."]}
    teach(path, [episode(agent, Speaker(texts, TOKENIZER)) for agent, texts in scripts.items()])
    return path


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[RliteInferenceEngine]:
    rlite.init(num_devices=1, num_threads=1)
    engine = RliteInferenceEngine(path)
    engine.build(max_model_len=1024, max_num_seqs=8)
    yield engine
    rlite.shutdown()


@contextlib.asynccontextmanager
async def served(engine: Any, **options: Any) -> AsyncIterator[tuple[AgentSession, Any]]:
    session = AgentSession(engine, TOKENIZER, GenerationHyperparameters(greedy=True, max_new_tokens=80), **options)
    async with AgentEndpoint() as endpoint, endpoint.serving(session) as access:
        yield session, access


class Witness:
    """An engine, and what it was asked and has made."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.sequences: list[list[int]] = []

    async def agenerate(self, request: Any, on_chunk: Any = None) -> Any:
        response = await self.engine.agenerate(request, on_chunk)
        self.sequences.append([*request.input_ids, *response.output_tokens])
        return response


# -- clients -----------------------------------------------------------------------------------------------------------


def test_the_synchronous_client_gets_what_the_engine_made(engine: RliteInferenceEngine) -> None:
    def use(access: Any) -> Any:
        with openai.OpenAI(base_url=access.base_url, api_key=access.api_key) as client:
            assert [model.id for model in client.models.list()] == ["policy"]
            assert client.models.retrieve("policy").owned_by == "rlite"
            text = client.completions.create(model="policy", prompt="Hello", max_tokens=5, logprobs=0)
            chat = client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": "Hi"}],
                max_completion_tokens=6,
                logprobs=True,
                n=2,
            )
            chunks = list(
                client.chat.completions.create(model="policy", messages=[QUESTION], stream=True, logprobs=True)
            )  # type: ignore[list-item]
            return text, chat, chunks

    async def both() -> Any:
        async with served(engine) as (session, access):
            return session, *await asyncio.to_thread(use, access)

    session, text, chat, chunks = asyncio.run(both())
    first, *choices, streamed = session.recording.turns
    parts = [chunk.choices[0] for chunk in chunks]
    assert "".join(part.delta.content or "" for part in parts) == streamed.text
    assert parts[-1].finish_reason == streamed.finish_reason
    logprobs = [token.logprob for part in parts if part.logprobs for token in part.logprobs.content]
    assert logprobs == pytest.approx(streamed.logprobs)
    expected = engine.generate(["Hello"], {"temperature": 0, "max_tokens": 5})[0].outputs[0]
    assert (text.choices[0].text, first.output_ids) == (expected.text, expected.token_ids)
    assert text.choices[0].logprobs.token_logprobs == pytest.approx(first.logprobs)
    assert text.usage.completion_tokens == len(first.output_ids)
    for choice, turn in zip(chat.choices, sorted(choices, key=lambda turn: turn.id), strict=True):
        assert choice.message.content == TOKENIZER.decode(turn.output_ids, skip_special_tokens=True)
        assert [token.logprob for token in choice.logprobs.content] == pytest.approx(turn.logprobs)


def test_the_asynchronous_client_streams_tools_and_text(engine: RliteInferenceEngine) -> None:
    async def use() -> Any:
        async with (
            served(engine) as (session, access),
            openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client,
        ):
            said, calls = [], []
            async with client.chat.completions.stream(model="policy", messages=[QUESTION], tools=[ADD]) as stream:  # type: ignore[list-item]
                async for event in stream:
                    if event.type == "tool_calls.function.arguments.done":
                        calls.append((event.name, event.arguments))
                final = await stream.get_final_completion()
            messages: list[Any] = [QUESTION, final.choices[0].message]
            assert final.choices[0].message.tool_calls is not None
            messages.append({"role": "tool", "tool_call_id": final.choices[0].message.tool_calls[0].id, "content": "3"})
            chunks = await client.chat.completions.create(
                model="policy", messages=messages, tools=[ADD], stream=True, stream_options={"include_usage": True}
            )  # type: ignore[call-overload]
            usage = None
            async for chunk in chunks:
                said += [choice.delta.content for choice in chunk.choices if choice.delta.content]
                usage = chunk.usage or usage
            return session, calls, said, usage

    session, calls, said, usage = asyncio.run(use())
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("add", {"a": 1, "b": 2})]
    assert "".join(said) == "It is 3."
    first, second = session.recording.turns
    assert second.parent is first
    assert usage.prompt_tokens == len(second.prompt_ids)
    assert usage.completion_tokens == len(second.output_ids)


def test_the_client_in_this_process_has_the_same_types_and_errors(engine: RliteInferenceEngine) -> None:
    async def use() -> Any:
        session = AgentSession(engine, TOKENIZER, GenerationHyperparameters(max_new_tokens=8))
        async with AgentClient(session) as client:
            chat = await client.chat.completions.create(
                model=client.model, messages=[{"role": "user", "content": "Hi"}]
            )
            client.set_reward(chat.id, 0.5)
            chunks = await client.completions.create(model="policy", prompt="Hi", stream=True)
            text = "".join([chunk.choices[0].text async for chunk in chunks])
            with pytest.raises(openai.NotFoundError, match="there is 'policy'"):
                await client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "Hi"}])
            for is_stream in (False, True):
                with pytest.raises(openai.BadRequestError, match="max_model_len=1024") as refusal:
                    await client.completions.create(model="policy", prompt="x" * 1100, stream=is_stream)
                assert refusal.value.code == "context_length_exceeded"
        return session, text

    session, text = asyncio.run(use())
    chat, completion = session.recording.completed()
    assert text == TOKENIZER.decode(completion.output_ids, skip_special_tokens=True)
    assert (chat.reward, completion.reward) == (0.5, None)


# -- the endpoint ------------------------------------------------------------------------------------------------------


async def post(access: Any, path: str, body: bytes, token: str | None = None) -> tuple[int, dict[str, Any]]:
    import aiohttp

    headers = {"Authorization": f"Bearer {access.api_key if token is None else token}"}
    async with (
        aiohttp.ClientSession() as client,
        client.post(access.base_url + path, data=body, headers=headers) as response,
    ):
        return response.status, (await response.json())["error"]


def test_bad_requests_are_answered_in_openais_form(engine: RliteInferenceEngine) -> None:
    chat = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
    cases = [
        ("/chat/completions", b'{"model": "policy",\n "messages": oops}', None, 400, "line 2 column 14"),
        ("/chat/completions", b"\xff", None, 400, "UTF-8 at byte 0"),
        ("/chat/completions", b"[]", None, 400, "expected a JSON object"),
        ("/chat/completions", b"[" * 100_000, None, 400, "not valid JSON"),
        ("/chat/completions", json.dumps(chat).encode(), "wrong", 401, "API key"),
        ("/chat/completions", json.dumps(chat).encode(), "\u00e9\u4e2d", 401, "API key"),
        ("/chat/completions", json.dumps({**chat, "model": "gpt-4"}).encode(), None, 404, "'gpt-4' does not exist"),
        ("/chat/completions", json.dumps({**chat, "logit_bias": {"5": 1}}).encode(), None, 400, "logit_bias"),
        ("/completions", json.dumps({"model": "policy", "prompt": "x" * 1100}).encode(), None, 400, "max_model_len"),
        ("/embeddings", b"{}", None, 404, "Not Found"),
        ("/models", b"{}", None, 405, "Method Not Allowed"),
    ]

    async def all_of_them() -> list[Any]:
        async with served(engine) as (session, access):
            answers = [await post(access, path, body, token) for path, body, token, _, _ in cases]
            assert not session.recording.completed()
            return answers

    for case, (status, error) in zip(cases, asyncio.run(all_of_them()), strict=True):
        assert (status, case[4] in error["message"]) == (case[3], True), error
        assert set(error) == {"message", "type", "param", "code"}


def test_a_client_that_disconnects_ends_its_generation_and_counts_once(engine: RliteInferenceEngine) -> None:
    async def use() -> AgentSession:
        async with (
            served(engine) as (session, access),
            openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as client,
        ):
            body: Any = {
                "model": "policy",
                "messages": [QUESTION],
                "max_tokens": 900,
                "extra_body": {"ignore_eos": True},
            }
            chunks = await client.chat.completions.create(**body, stream=True)
            await anext(aiter(chunks))
            await chunks.close()
            while engine.num_in_flight or len(session.recording.turns) != 1:
                await asyncio.sleep(0.005)
            whole = asyncio.create_task(client.chat.completions.create(**body))
            while not engine.num_in_flight:
                await asyncio.sleep(0.005)
            whole.cancel()
            while engine.num_in_flight or len(session.recording.turns) != 2:
                await asyncio.sleep(0.005)
            await client.chat.completions.create(model="policy", messages=[QUESTION], max_tokens=4)  # type: ignore[list-item]
            return session

    session = asyncio.run(asyncio.wait_for(use(), 200))
    assert [turn.is_aborted for turn in session.recording.turns] == [True, True, False]
    assert 0 < len(session.recording.turns[0].output_ids) < 900
    session.set_last_reward(1)
    assert session.export("individual")["loss_mask"].sum().item() == 4
    assert len(session.export("individual", include_aborted=True)) >= 2


def test_a_session_that_ends_takes_its_requests_with_it(engine: RliteInferenceEngine) -> None:
    async def use() -> None:
        async with AgentEndpoint() as endpoint:
            session = AgentSession(engine, TOKENIZER)
            async with endpoint.serving(session) as access:
                client = openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)
                late = asyncio.create_task(
                    client.completions.create(model="policy", prompt="x", extra_body={"ignore_eos": True})
                )
                while not engine.num_in_flight:
                    await asyncio.sleep(0.005)
            with pytest.raises(openai.APIError):
                await late
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
            await client.close()
            while engine.num_in_flight:
                await asyncio.sleep(0.005)
            assert not session.recording.completed()

    asyncio.run(asyncio.wait_for(use(), 200))


def test_two_sessions_at_once_never_mix(engine: RliteInferenceEngine) -> None:
    async def use() -> tuple[list[AgentSession], list[list[str]]]:
        gconfig = GenerationHyperparameters(max_new_tokens=12)
        sessions = [AgentSession(engine, TOKENIZER, gconfig) for _ in range(3)]
        said: list[list[str]] = [[] for _ in sessions]

        async def talk(number: int, access: Any) -> None:
            async with openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
                messages: list[Any] = []
                for turn in range(4):
                    messages.append({"role": "user", "content": f"{number}.{turn}"})
                    answer = await client.chat.completions.create(model="policy", messages=messages)
                    messages.append(answer.choices[0].message.model_dump())
                    said[number].append(answer.choices[0].message.content or "")

        async with AgentEndpoint() as endpoint, contextlib.AsyncExitStack() as stack:
            accesses = [await stack.enter_async_context(endpoint.serving(session)) for session in sessions]
            assert len({access.base_url for access in accesses}) == 1
            await asyncio.gather(*(talk(number, access) for number, access in enumerate(accesses)))
        return sessions, said

    sessions, said = asyncio.run(use())
    for number, session in enumerate(sessions):
        turns = session.recording.turns
        assert [turn.text for turn in turns] == said[number]
        assert [turn.messages[-1]["content"] for turn in turns if turn.messages] == [f"{number}.{t}" for t in range(4)]
        assert [turn.parent for turn in turns] == [None, *turns[:-1]]


# -- training ----------------------------------------------------------------------------------------------------------


@on_logprobs
def grpo_loss(tokens: Any, data: Any) -> Any:
    keys = ("logprobs", "advantages", "loss_mask")
    old, advantages, mask = (next_token(data[key], data["cu_seqlens"]) for key in keys)
    inputs = LossInputs(tokens.logprobs, old, advantages, mask, cu_seqlens=data["cu_seqlens"])
    return masked_mean(ppo_clip(inputs, clip_low=0.2, clip_high=0.28).loss, mask)


class Policy(HuggingFaceFsdp2TrainModule, Qwen3ForCausalLM):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("agent", "interface", "num_turns"),
    [(framework, "client", 2), (framework_over_http, "http", 2), (conversation, "client", 3)],
)
def test_an_agent_exports_the_engines_tokens(
    engine: RliteInferenceEngine, agent: Any, interface: str, num_turns: int
) -> None:
    witness = Witness(engine)
    batch = episode(agent, witness, interface=interface)
    assert batch["input_ids"].tolist() == [witness.sequences[-1]]
    assert batch["num_turns"].tolist() == [num_turns]
    assert batch["rewards"].tolist() == [1.0]
    model = AutoModelForCausalLM.from_pretrained(engine.path).eval()
    with torch.no_grad():
        logprobs = model(batch["input_ids"]).logits.log_softmax(-1)[:, :-1]
    expected = logprobs.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    mask = batch["loss_mask"][:, 1:]
    torch.testing.assert_close(batch["logprobs"][:, 1:][mask], expected[mask], atol=1e-3, rtol=0)


def test_recorded_agents_are_trained_on(engine: RliteInferenceEngine) -> None:
    with init_empty_weights():
        actor = RliteTrainEngine(Policy.from_pretrained(engine.path))
    actor.build(colocate_with=engine)
    workflow = AgentWorkflow(framework, GenerationHyperparameters(max_new_tokens=80, temperature=1.0), TOKENIZER)
    batch = engine.rollout_batch([{"question": "1+2?"}], workflow, group_size=4)
    assert set(batch["group_ids"].tolist()) == {0}
    first = batch["sequence_index"] == 0
    batch["rewards"] = torch.tensor([0.0, 1.0, 0.0, 1.0])[first.cumsum(0) - 1]
    advantages = group_advantages(batch["rewards"].double(), batch["group_ids"])
    batch["advantages"] = advantages.float()[:, None] * batch["loss_mask"]
    stats = actor.train_batch(
        batch, loss_fn=grpo_loss, loss_weight_fn=lambda data: next_token(data["loss_mask"], data["cu_seqlens"]).sum()
    )
    assert stats["grad_norm"] > 0
    actor.p2p_weight_sync(engine)
    again = engine.rollout_batch([{"question": "1+2?"}], workflow)
    assert again["versions"][again["loss_mask"]].unique().tolist() == [1]
