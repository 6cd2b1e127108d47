"""The official clients of OpenAI and Anthropic against every route: whole, streamed, with tools, and refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from rlite.rollout.openai import Access, AgentEndpoint, AgentSession
from rlite.services.endpoint.dialects.table import DIALECTS
from tests.agents import ADD, WITH_TOOLS, Speaker, tokenizer_with

anthropic: Any = pytest.importorskip("anthropic")

TOKENIZER = tokenizer_with(WITH_TOOLS)
THOUGHT, SAID = "I add two and three.", "Let me see."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TEXTS = [f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{CALL}", "<think>\n\n</think>\n\nIt is 5."]
"""the first answer thinks, speaks and calls a tool; the second one says the result"""
SCHEMA = ADD["function"]["parameters"]
TOOLS: dict[str, list[Any]] = {
    "chat": [ADD],
    "responses": [{"type": "function", "name": "add", "description": "Add two numbers.", "parameters": SCHEMA}],
    "messages": [{"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA}],
}
QUESTION = "What is 2 + 3?"


class Said(NamedTuple):
    """What a client has understood of an answer."""

    thought: str
    text: str
    calls: list[tuple[str, str]]
    """name and arguments of each call of a tool"""
    reason: str
    history: list[Any]
    """the messages with which the next request continues"""


Ask = Callable[[Any, list[Any], bool], Awaitable[Said]]


async def chat(client: Any, history: list[Any], is_stream: bool) -> Said:
    options: dict[str, Any] = {"model": "policy", "messages": history, "tools": TOOLS["chat"]}
    if is_stream:
        async with client.chat.completions.stream(**options) as stream:
            answer = await stream.get_final_completion()
    else:
        answer = await client.chat.completions.create(**options)
    message = answer.choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    thought, _, text = (message.content or "").rpartition("</think>")
    said = {"role": "assistant", "content": message.content, "tool_calls": message.tool_calls or None}
    results = [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in message.tool_calls or ()]
    thought = thought.removeprefix("<think>").strip()
    return Said(thought, text.strip(), calls, answer.choices[0].finish_reason, [*history, said, *results])


async def responses(client: Any, history: list[Any], is_stream: bool) -> Said:
    options: dict[str, Any] = {"model": "policy", "input": history, "tools": TOOLS["responses"]}
    if is_stream:
        async with client.responses.stream(**options) as stream:
            answer = await stream.get_final_response()
    else:
        answer = await client.responses.create(**options)
    thoughts = [item.content for item in answer.output if item.type == "reasoning"]
    called = [item for item in answer.output if item.type == "function_call"]
    output = [item.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for item in answer.output]
    for item in output:
        for part in item.get("content", ()):
            part.pop("parsed", None)
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "5"} for item in called]
    reason = "tool_calls" if called else answer.status
    thought = "".join(part.text for content in thoughts for part in content or ())
    calls = [(item.name, item.arguments) for item in called]
    return Said(thought, answer.output_text, calls, reason, [*history, *output, *results])


async def messages(client: Any, history: list[Any], is_stream: bool) -> Said:
    options: dict[str, Any] = {"model": "policy", "max_tokens": 900, "messages": history, "tools": TOOLS["messages"]}
    if is_stream:
        async with client.messages.stream(**options) as stream:
            answer = await stream.get_final_message()
    else:
        answer = await client.messages.create(**options)
    blocks = {
        kind: [block for block in answer.content if block.type == kind] for kind in ("thinking", "text", "tool_use")
    }
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "5"} for block in blocks["tool_use"]]
    calls = [(block.name, json.dumps(block.input)) for block in blocks["tool_use"]]
    content = [block.model_dump(exclude_none=True, exclude={"parsed_output"}) for block in answer.content]
    following = [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    texts = ["".join(getattr(block, kind) for block in blocks[kind]) for kind in ("thinking", "text")]
    return Said(*texts, calls, answer.stop_reason, [*history, *following])


ROUTES: dict[str, Ask] = {"chat": chat, "responses": responses, "messages": messages}
ENDS = {"chat": ("tool_calls", "stop"), "responses": ("tool_calls", "completed"), "messages": ("tool_use", "end_turn")}
"""reasons of an answer that calls a tool, and of one that does not"""


class Beside:
    """A synchronous client whose methods run in a thread, so that the table asks both kinds in one way."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return Beside(found) if not callable(found) else lambda **options: Beside(_Call(found, options))

    def __await__(self) -> Any:
        return asyncio.to_thread(self._inner).__await__()

    async def __aenter__(self) -> Any:
        return _Stream(await asyncio.to_thread(lambda: self._inner().__enter__()))

    async def __aexit__(self, *raised: object) -> None:
        pass


class _Call:
    def __init__(self, method: Any, options: dict[str, Any]) -> None:
        self._method, self._options = method, options

    def __call__(self) -> Any:
        return self._method(**self._options)


class _Stream:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return lambda: asyncio.to_thread(getattr(self._inner, name))


@contextlib.asynccontextmanager
async def client_of(route: str, is_async: bool, access: Access) -> AsyncIterator[Any]:
    package, url = (anthropic, access.root) if route == "messages" else (openai, access.base_url)
    name = package.__name__.replace("openai", "OpenAI").replace("anthropic", "Anthropic")
    client = getattr(package, f"Async{name}" if is_async else name)(base_url=url, api_key=access.api_key, max_retries=0)
    try:
        yield client if is_async else Beside(client)
    finally:
        await client.close() if is_async else client.close()


@contextlib.asynccontextmanager
async def served(session: AgentSession) -> AsyncIterator[Access]:
    async with AgentEndpoint() as endpoint, endpoint.serving(session) as access:
        yield access


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_client_reads_thoughts_texts_and_calls_and_continues_with_the_recorded_tokens(
    route: str, is_async: bool, is_stream: bool
) -> None:
    session = AgentSession(Speaker(TEXTS, TOKENIZER), TOKENIZER)

    async def use() -> tuple[Said, Said]:
        async with served(session) as access, client_of(route, is_async, access) as client:
            first = await ROUTES[route](client, [{"role": "user", "content": QUESTION}], is_stream)
            return first, await ROUTES[route](client, first.history, is_stream)

    first, second = asyncio.run(asyncio.wait_for(use(), 250))
    assert first[:3] == (THOUGHT, SAID, [("add", '{"a": 2, "b": 3}')])
    assert second[:3] == ("", "It is 5.", [])
    assert (first.reason, second.reason) == ENDS[route]
    earlier, later = session.recording.turns
    assert later.parent is earlier
    assert later.prompt_ids[: len(earlier.sequence)] == earlier.sequence
    assert not earlier.is_aborted


WRONG: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    "messages": {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}],
    },
}
RIGHT: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "responses": {"input": "x"},
    "messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
}
METHODS = {"chat": "chat.completions.create", "responses": "responses.create", "messages": "messages.create"}
REFUSED = [("image", 400, "BadRequestError"), ("model", 404, "NotFoundError"), ("key", 401, "AuthenticationError")]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_client_raises_the_error_of_its_own_package(route: str, is_async: bool, is_stream: bool) -> None:
    session = AgentSession(Speaker(["yes"], TOKENIZER), TOKENIZER)
    package = anthropic if route == "messages" else openai

    async def use() -> None:
        async with served(session) as access:
            for what, status, name in REFUSED:
                right = Access(access.base_url, "wrong" if what == "key" else access.api_key, access.model)
                body = WRONG[route] if what == "image" else RIGHT[route]
                body = {**body, "model": "other" if what == "model" else "policy", "stream": is_stream}
                async with client_of(route, is_async, right) as client:
                    method = client
                    for part in METHODS[route].split("."):
                        method = getattr(method, part)
                    with pytest.raises(getattr(package, name)) as refusal:
                        await method(**body)
                    assert refusal.value.status_code == status

    asyncio.run(asyncio.wait_for(use(), 250))
    assert session.recording.turns == []


class Breaking(Speaker):
    """Breaks after its first token, with the prompt and a path in the exception."""

    async def stream(self, request: Any) -> AsyncIterator[Any]:
        async for chunk in super().stream(request):
            yield chunk
            raise ZeroDivisionError(f"in /srv/model/weights.py: {QUESTION}")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_that_breaks_raises_in_the_client(route: str, is_async: bool) -> None:
    session = AgentSession(Breaking(TEXTS, TOKENIZER), TOKENIZER)
    package = anthropic if route == "messages" else openai

    async def use() -> None:
        async with served(session) as access, client_of(route, is_async, access) as client:
            with pytest.raises(package.APIError, match="the server failed with ZeroDivisionError"):
                await ROUTES[route](client, [{"role": "user", "content": QUESTION}], True)

    asyncio.run(asyncio.wait_for(use(), 250))
    assert [turn.is_aborted for turn in session.recording.turns] == [True]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_client_of_completions_reads_the_text_and_raises_its_own_errors(is_async: bool, is_stream: bool) -> None:
    session = AgentSession(Speaker(["four and five"], TOKENIZER), TOKENIZER)

    def text_of(answer: Any) -> str:
        parts = answer if is_stream else [answer]
        return "".join(choice.text for part in parts for choice in part.choices)

    def use(access: Access) -> str:
        with openai.OpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as client:
            for what, error in (("model", openai.NotFoundError), ("suffix", openai.BadRequestError)):
                wrong: dict[str, Any] = {"model": "policy", "prompt": "x", "stream": is_stream, what: "other"}
                with pytest.raises(error):
                    client.completions.create(**wrong)
            return text_of(client.completions.create(model="policy", prompt="say", stream=is_stream))

    async def ause(access: Access) -> str:
        async with openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as client:
            for what, error in (("model", openai.NotFoundError), ("suffix", openai.BadRequestError)):
                wrong: dict[str, Any] = {"model": "policy", "prompt": "x", "stream": is_stream, what: "other"}
                with pytest.raises(error):
                    await client.completions.create(**wrong)
            answer: Any = await client.completions.create(model="policy", prompt="say", stream=is_stream)
            return text_of([part async for part in answer] if is_stream else answer)

    async def run() -> str:
        async with served(session) as access:
            return await (ause(access) if is_async else asyncio.to_thread(use, access))

    assert asyncio.run(asyncio.wait_for(run(), 250)) == "four and five"
    assert len(session.recording.turns) == 1


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_tokens_are_counted_as_the_prompt_of_the_same_conversation(is_async: bool) -> None:
    session = AgentSession(Speaker(TEXTS, TOKENIZER), TOKENIZER)
    asked = {
        "model": "policy",
        "system": "Be brief.",
        "messages": RIGHT["messages"]["messages"],
        "tools": TOOLS["messages"],
    }

    async def use() -> tuple[int, int]:
        async with served(session) as access, client_of("messages", is_async, access) as client:
            counted = await client.messages.count_tokens(**asked)
            answer = await client.messages.create(**asked, max_tokens=5)
            return counted.input_tokens, answer.usage.input_tokens

    counted, read = asyncio.run(asyncio.wait_for(use(), 250))
    assert counted == read == len(session.recording.turns[0].prompt_ids)
    assert len(session.recording.turns) == 1, "counting is no turn"


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("route", ["chat", "messages"])
def test_models_are_listed_for_both_packages(route: str, is_async: bool) -> None:
    session = AgentSession(Speaker(["x"], TOKENIZER), TOKENIZER)

    async def use() -> list[str]:
        async with served(session) as access, client_of(route, is_async, access) as client:
            if is_async:
                return [model.id async for model in client.models.list()]
            listed = await client.models.list()
            return [model.id for model in listed.data]

    assert asyncio.run(asyncio.wait_for(use(), 100)) == ["policy"]


COUNTED = {"model": "policy", "messages": RIGHT["messages"]["messages"]}
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "completions": ("chat", "completions.create", {"model": "policy", "prompt": "x"}),
    "count_tokens": (
        "messages",
        "messages.count_tokens",
        {"model": "policy", "messages": RIGHT["messages"]["messages"]},
    ),
    "models": ("chat", "models.list", {}),
}
"""client, method and request of the routes without turns of a chat"""
UNKNOWN = {"completions": {"model": "other"}, "count_tokens": {"model": "other"}}
UNUSABLE = {"completions": {"prompt": 3}, "count_tokens": {"messages": WRONG["messages"]["messages"]}}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("route", OTHERS)
def test_the_other_routes_refuse_with_the_error_of_the_package(route: str, is_async: bool) -> None:
    session = AgentSession(Speaker(["x"], TOKENIZER), TOKENIZER)
    kind, path, body = OTHERS[route]
    package = anthropic if kind == "messages" else openai
    cases = [("wrong", {}, package.AuthenticationError)]
    cases += [("", UNKNOWN[route], package.NotFoundError)] if route in UNKNOWN else []
    cases += [("", UNUSABLE[route], package.BadRequestError)] if route in UNUSABLE else []

    async def use() -> None:
        async with served(session) as access:
            for key, change, error in cases:
                own = Access(access.base_url, key or access.api_key, access.model)
                async with client_of(kind, is_async, own) as client:
                    method = client
                    for part in path.split("."):
                        method = getattr(method, part)
                    with pytest.raises(error):
                        await method(**{**body, **change})

    asyncio.run(asyncio.wait_for(use(), 100))
    assert session.recording.turns == []


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_stream_of_completions_that_breaks_raises_in_the_client(is_async: bool) -> None:
    session = AgentSession(Breaking(TEXTS, TOKENIZER), TOKENIZER)

    def read(access: Access) -> None:
        with openai.OpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as client:
            list(client.completions.create(model="policy", prompt="x", stream=True))

    async def aread(access: Access) -> None:
        async with client_of("chat", True, access) as client:
            answer = await client.completions.create(model="policy", prompt="x", stream=True)
            [part async for part in answer]

    async def use() -> None:
        async with served(session) as access:
            with pytest.raises(openai.APIError, match="the server failed with ZeroDivisionError"):
                await (aread(access) if is_async else asyncio.to_thread(read, access))

    asyncio.run(asyncio.wait_for(use(), 100))
    assert [turn.is_aborted for turn in session.recording.turns] == [True]


PAGE = Path(__file__).parents[4] / "docs" / "serving.md"


def test_each_cell_of_the_pages_table_is_a_test_of_this_file() -> None:
    section = PAGE.read_text().split("## Official clients")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    assert {row[0].strip(" `") for row in rows} == {
        path for path in (*DIALECTS, "/v1/models") if path != "/inference/v1/generate"
    }
    cells = {cell.strip() for row in rows for cell in row[1:]} - {"-"}
    letters = dict(re.findall(r"^- ([A-H]): `(test_\w+)`", section, re.MULTILINE))
    assert cells == set(letters)
    assert {name for name in letters.values() if name not in globals()} == set()
