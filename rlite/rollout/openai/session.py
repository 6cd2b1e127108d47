"""One agent's conversation with an engine: requests in OpenAI's interface, answers, and the recording of both."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tensordict import TensorDict

from rlite.data.chat.raw import TooManyTokens
from rlite.data.chat.template import TemplateRefusal
from rlite.errors import ConfigError, DataError, RliteError
from rlite.rollout.background import beside_loop
from rlite.rollout.collector.seeds import mix
from rlite.rollout.openai import responses
from rlite.rollout.openai.prompts import ChatPrompts, Prompt
from rlite.rollout.openai.recording import Recording, Style, Turn, export
from rlite.rollout.openai.requests import ApiError, ModelRequest, parse_json, read_chat, read_completion
from rlite.rollout.openai.responses import Choice, Delta, Envelope
from rlite.rollout.openai.text import TextStream
from rlite.rollout.tools.formats import ToolCallFormat
from rlite.rollout.tools.probe import tool_call_format
from rlite.rollout.workflow import Tokenizer, context_length
from rlite.types import AsyncInference, GenerationHyperparameters, LLMRequest

MAX_BODY_BYTES = 64 << 20
"""of a request, whatever the context"""
MIN_BODY_BYTES = 8 << 20
"""of a request that is always read: templates may leave out most of a conversation"""
BODY_BYTES_PER_TOKEN = 64
"""of a request, for each token of the context"""


@dataclass(frozen=True)
class Reply:
    """Answer to a request: one object, or with `is_stream` one after the other.

    Read `messages` to its end once the client has everything. Leaving it earlier ends the generation, and its turns
    count as aborted.
    """

    is_stream: bool
    messages: AsyncGenerator[dict[str, Any], None]


class AgentSession:
    """Server of one agent, and recorder of everything that the model reads and writes.

    Args:
        engine: generates.
        tokenizer: the model's tokenizer.
        gconfig: sampling parameters that a request does not set.
        model: name that requests must give.
        tool_format: a name in `rlite.rollout.tools.formats.FORMATS`, or a ToolCallFormat; default: the format that the
            chat template teaches.
        chat_template_options: further keyword arguments for `apply_chat_template`.
        max_length: tokens of prompt and answer together; None is the engine's limit.
        is_sampling_fixed: temperature, top_p and top_k are those of `gconfig`, whatever a request sets.
    """

    def __init__(
        self,
        engine: AsyncInference,
        tokenizer: Tokenizer,
        gconfig: GenerationHyperparameters | Mapping[str, Any] | None = None,
        *,
        model: str = "policy",
        tool_format: str | ToolCallFormat | None = None,
        chat_template_options: Mapping[str, Any] | None = None,
        max_length: int | None = None,
        is_sampling_fixed: bool = False,
    ) -> None:
        self.engine = engine
        self.model = model
        self.recording = Recording()
        self.failure: RliteError | None = None
        """the engine's own, which no agent can help"""
        self._gconfig = GenerationHyperparameters.from_mapping(gconfig)
        limit = context_length(engine, max_length)
        self._prompts = ChatPrompts(tokenizer, chat_template_options, limit)
        self.max_body_bytes = MAX_BODY_BYTES
        """the longest request that is read"""
        if limit is not None:
            self.max_body_bytes = min(MAX_BODY_BYTES, max(MIN_BODY_BYTES, BODY_BYTES_PER_TOKEN * limit))
        self._find_format = partial(tool_call_format, tool_format, tokenizer, chat_template_options)
        self._tool_format = self._find_format() if tool_format is not None else None
        self._max_length = max_length
        self._is_sampling_fixed = is_sampling_fixed
        self._rid = uuid.uuid4().hex
        self._call_numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    # -- rewards -------------------------------------------------------------------------------------------------

    def set_reward(self, interaction_id: str, reward: float) -> None:
        """Set the reward of the answer with this id; see `Recording.set_reward`.

        The id is the response's. In a response with several choices it is `ID:INDEX`.
        """
        self.recording.set_reward(interaction_id, reward)

    def set_last_reward(self, reward: float) -> None:
        """Set the reward of the latest answer."""
        self.recording.set_last_reward(reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Share the rewards of later answers with earlier ones; see `Recording.apply_reward_discount`."""
        self.recording.apply_reward_discount(turn_discount)

    def export(self, style: Style = "concat", include_aborted: bool = False) -> TensorDict:
        """Return the trainable data; see `rlite.rollout.openai.recording.export`."""
        return export(self.recording, style, include_aborted)

    async def close(self) -> None:
        """End running generations as aborted turns, and refuse further requests."""
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- serving -------------------------------------------------------------------------------------------------

    async def answer(self, path: str, body: bytes) -> Reply:
        """Answer a request in wire form. A long request is read and tokenised beside the event loop.

        Args:
            path: "/chat/completions" or "/completions".
            body: JSON.

        Returns:
            The reply.

        Raises:
            ApiError: as `chat`; or the body is too long.
        """
        if len(body) > self.max_body_bytes:
            raise too_large(self.max_body_bytes)
        ask = self.chat if path == "/chat/completions" else self.completion
        return await beside_loop(len(body), lambda: ask(parse_json(body)))

    def chat(self, body: Any) -> Reply:
        """Answer a body of /chat/completions. It is tokenised in this call; see `answer`.

        Returns:
            The reply.

        Raises:
            ApiError: the request is refused, here or before the first message.
        """
        with _refused():
            request = read_chat(body, self.model, self._gconfig)
            assert request.messages is not None
            self._check_format(request)
            prompt = self._prompts.chat(request.messages, request.tools, self.recording.turns)
        envelope = Envelope(f"chatcmpl-{uuid.uuid4().hex}", self.model, request, True, self._prompts.tokenizer)
        return Reply(request.is_stream, self._messages(request, prompt, envelope))

    def completion(self, body: Any) -> Reply:
        """Answer a body of /completions. Errors are those of `chat`.

        Returns:
            The reply.
        """
        with _refused():
            request = read_completion(body, self.model, self._gconfig)
            assert request.prompt is not None
            prompt = self._prompts.text(request.prompt, self.recording.turns)
        envelope = Envelope(f"cmpl-{uuid.uuid4().hex}", self.model, request, False, self._prompts.tokenizer)
        return Reply(request.is_stream, self._messages(request, prompt, envelope))

    def _check_format(self, request: ModelRequest) -> None:
        """Determine the format of tool calls before the first call is requested.

        Raises:
            ApiError: the format is unknown; the failure is the run's.
        """
        if not request.may_call or self._tool_format is not None:
            return
        try:
            self._tool_format = self._find_format()
        except ConfigError as error:
            self.failure = error
            raise ApiError(f"tools: {error}", param="tools", code="unsupported_value") from error

    async def _messages(
        self, request: ModelRequest, prompt: Prompt, envelope: Envelope
    ) -> AsyncGenerator[dict[str, Any], None]:
        turns: list[Turn] = []
        try:
            async with contextlib.aclosing(self._events(request, prompt, envelope, turns)) as events:
                if request.is_stream:
                    async with contextlib.aclosing(responses.stream(envelope, prompt.token_ids, events)) as chunks:
                        async for message in chunks:
                            yield message
                else:
                    choices = [event async for event in events if isinstance(event, Choice)]
                    yield responses.whole(envelope, prompt.token_ids, choices)
        except BaseException:  # also GeneratorExit: the client will ask again, and must not count twice
            for turn in turns:
                turn.is_aborted = True
            raise

    async def _events(
        self, request: ModelRequest, prompt: Prompt, envelope: Envelope, turns: list[Turn]
    ) -> AsyncGenerator[Delta | Choice, None]:
        """Generate all choices, and add their turns to `turns`.

        Yields:
            Deltas and choices, as they arrive.

        Raises:
            ApiError: the session has ended.
        """
        gconfig = self._fitting(request.gconfig, len(prompt.token_ids))
        events: asyncio.Queue[Delta | Choice | Exception] = asyncio.Queue()

        async def choose(index: int) -> None:
            try:
                events.put_nowait(
                    await self._choose(index, request, prompt, gconfig, envelope, turns, events.put_nowait)
                )
            except asyncio.CancelledError:
                events.put_nowait(_closed())  # if it was the session that ended, the client is told
                raise
            except Exception as error:
                events.put_nowait(error)

        if self._is_closed:
            raise _closed()
        tasks = [asyncio.create_task(choose(index)) for index in range(request.num_choices)]
        self._tasks.update(tasks)
        try:
            num_left = len(tasks)
            while num_left:
                event = await events.get()
                if isinstance(event, Exception):
                    raise self._error(event)
                yield event
                num_left -= isinstance(event, Choice)
        finally:
            if left := [task for task in tasks if not task.done()]:  # else no pause: all was sent, and counts
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)
            self._tasks.difference_update(tasks)

    async def _choose(
        self,
        index: int,
        request: ModelRequest,
        prompt: Prompt,
        gconfig: GenerationHyperparameters,
        envelope: Envelope,
        turns: list[Turn],
        say: Callable[[Delta], None],
    ) -> Choice:
        """Return one choice, generated from its first token to its last.

        Args:
            index: number of the choice.
            request: the request.
            prompt: its prompt.
            gconfig: sampling parameters.
            envelope: id and form of the response.
            turns: gets the choice's turn.
            say: called with each delta.

        Raises:
            ApiError: the engine aborted the answer.
        """
        if gconfig.seed is not None and index:
            gconfig = gconfig.new(seed=mix(gconfig.seed, index))
        form = self._tool_format if request.may_call else None
        text = TextStream(self._prompts.tokenizer, gconfig.stop, form, request.tools)
        turn = Turn(
            id=envelope.id if request.num_choices == 1 else f"{envelope.id}:{index}",
            prompt_ids=prompt.token_ids,
            output_ids=[],
            logprobs=[],
            versions=[],
            finish_reason="abort",
            parent=prompt.parent,
            messages=request.messages,
            tools=request.tools,
            prompt_text=prompt.text,
            is_aborted=True,
        )
        turns.append(turn)
        unread: list[int] = []
        try:
            stream = self.engine.stream(LLMRequest(input_ids=list(prompt.token_ids), gconfig=gconfig, rid=self._rid))
            async for chunk in _closing(stream):
                turn.output_ids += chunk.token_ids
                turn.logprobs += chunk.logprobs
                turn.versions += [chunk.version] * len(chunk.token_ids)
                turn.finish_reason = chunk.finish_reason or turn.finish_reason
                unread += chunk.token_ids
                if request.is_stream or chunk.finish_reason is not None:
                    settled, unread = text.feed(unread, chunk.finish_reason is not None), []
                    say(Delta(index, settled, turn, chunk))
        finally:
            self.recording.turns.append(turn)
        if turn.finish_reason == "abort":
            raise ApiError(f"the engine aborted the answer after {len(turn.output_ids)} tokens", 503, code="aborted")
        content, calls, rest = text.finish()
        turn.text = text.text
        if request.messages is not None:
            turn.answer = responses.answer(content, calls, self._call_numbers)
        turn.is_aborted = False
        return Choice(index, turn, content, rest)

    def _fitting(self, gconfig: GenerationHyperparameters, num_prompt: int) -> GenerationHyperparameters:
        """Return the sampling parameters with fixed ones and the limit of tokens applied.

        Raises:
            ApiError: there is no room for an answer.
        """
        if self._is_sampling_fixed:
            fixed = ("greedy", "temperature", "top_p", "top_k")
            gconfig = gconfig.new(**{name: getattr(self._gconfig, name) for name in fixed})
        if self._max_length is None:
            return gconfig
        room = self._max_length - num_prompt
        if room < 1:
            raise _too_long(f"the prompt has {num_prompt} tokens, and max_length={self._max_length} leaves no room")
        return gconfig.new(
            max_new_tokens=min(gconfig.max_new_tokens, room), min_new_tokens=min(gconfig.min_new_tokens, room)
        )

    def _error(self, error: Exception) -> Exception:
        """Return an engine's error as the agent sees it."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, DataError | ConfigError):
            # the engine alone knows its bound, and says it in words
            return _too_long(str(error)) if "max_model_len" in str(error) else ApiError(str(error))
        if isinstance(error, RliteError):
            self.failure = error
            return ApiError(f"the engine cannot serve: {error}", 503, code="engine_failed")
        return error


def _closed() -> ApiError:
    return ApiError("the session has ended", 409, code="session_closed")


def too_large(num_bytes: int) -> ApiError:
    """Return the error for a request whose body is longer than the session reads."""
    message = f"the body is longer than {num_bytes} bytes, which is far more than the model's context holds"
    return ApiError(message, 413, code="context_length_exceeded")


def _too_long(message: str) -> ApiError:
    return ApiError(message, param="messages", code="context_length_exceeded")


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Convert errors of a conversation inside the block to errors for the client.

    Yields:
        None.

    Raises:
        ApiError: the conversation is refused.
    """
    try:
        yield
    except TooManyTokens as error:
        raise _too_long(str(error)) from error
    except TemplateRefusal as error:
        raise ApiError(f"messages: {error}", param="messages", code="invalid_value") from error
    except DataError as error:
        param = str(error).partition(":")[0]
        raise ApiError(str(error), param=param, code="invalid_value") from error


async def _closing(stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yield the values of a stream, and close it with the loop over it."""
    try:
        async for value in stream:
            yield value
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
