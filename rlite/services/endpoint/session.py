"""One agent's conversation with an engine: requests in any dialect, answers, and the recording of both."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlite.data.chat.template import TemplateRefusal, Tokenizer
from rlite.data.prompts import TooManyTokens
from rlite.errors import ConfigError, DataError, RliteError
from rlite.rollout.episode import mix
from rlite.rollout.tools.formats import ToolCallFormat
from rlite.rollout.tools.workflow import tool_call_format
from rlite.rollout.workflow import context_length, end_ids
from rlite.runtime.event_loop import beside_loop
from rlite.services.endpoint.dialects.openai import CHAT, COMPLETION
from rlite.services.endpoint.exchange import Choice, Delta, Dialect, Exchange, Reply, assistant_message
from rlite.services.endpoint.prompts import ChatPrompts, check_num_scored, check_scores, slices
from rlite.services.endpoint.recording import Recording, RecordingOwner, Turn
from rlite.services.endpoint.requests import ApiError, ModelRequest, parse_json, unknown_model
from rlite.services.endpoint.text_stream import TextStream
from rlite.types import AsyncInference, GenerationHyperparameters, LLMRequest, PromptLogprobs, TokenChunk

Serve = Callable[["AgentSession"], contextlib.AbstractAsyncContextManager[Any]]
"""serves a session inside a block, and gives what an agent needs to use it"""
MAX_BODY_BYTES = 64 << 20
"""size limit of a request, for every context length"""
MIN_BODY_BYTES = 8 << 20
"""size that a request may always have: templates may leave out most of a conversation"""
BODY_BYTES_PER_TOKEN = 64
"""allowed size of a request for each token of the context"""


class AgentSession(RecordingOwner):
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
        is_sampling_fixed: temperature, top_p and top_k are those of `gconfig`, not those of a request.
        is_recording: keep the turns. False is for an evaluation of many requests that are not trained on.
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
        is_recording: bool = True,
    ) -> None:
        self.engine = engine
        self.model = model
        self.recording = Recording()
        self.failure: RliteError | None = None
        """the engine's error; the agent cannot fix it"""
        self._gconfig = GenerationHyperparameters.from_mapping(gconfig)
        self._limit = limit = context_length(engine, max_length)
        self._prompts = ChatPrompts(tokenizer, chat_template_options, limit)
        self._end_ids = end_ids(engine, tokenizer)
        wanted = MAX_BODY_BYTES if limit is None else BODY_BYTES_PER_TOKEN * limit
        self.max_body_bytes = min(MAX_BODY_BYTES, max(MIN_BODY_BYTES, wanted))
        """the longest request that is read"""
        self._find_format = partial(tool_call_format, tool_format, tokenizer, chat_template_options)
        self._tool_format = self._find_format() if tool_format is not None else None
        self._max_length, self._is_sampling_fixed, self._is_recording = max_length, is_sampling_fixed, is_recording
        self._rid = uuid.uuid4().hex
        self._call_numbers = itertools.cycle(range(1, 100_000))  # five digits
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def close(self) -> None:
        """End running generations as aborted turns, and refuse further requests."""
        self._is_closed = True
        await _cancel(self._tasks)

    @contextlib.asynccontextmanager
    async def used(self, serve: Serve) -> AsyncIterator[Any]:
        """Let an agent use the session inside the block. What the agent has left running does not count.

        Args:
            serve: serves the session.

        Yields:
            What the agent gets.

        Raises:
            RliteError: the engine's error, of which the agent has only seen a response with a status.
        """
        try:
            async with serve(self) as access:
                try:
                    yield access
                finally:
                    await self.close()
        except Exception as error:
            if self.failure is not None:
                raise self.failure from error
            raise
        if self.failure is not None:
            raise self.failure

    def models(self, name: str | None = None) -> dict[str, Any]:
        """Return the answer to a request for the list of models, or for the entry of one.

        Raises:
            ApiError: the name is another than the session's.
        """
        if name not in (None, self.model):
            raise unknown_model(name, self.model)
        entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "rlite"}
        entry |= {"type": "model", "display_name": self.model, "created_at": "1970-01-01T00:00:00Z"}  # Anthropic's
        entry |= {"lifecycle": "active", "max_model_len": self._limit}
        ends = {"first_id": self.model, "last_id": self.model, "has_more": False}
        return {"object": "list", "data": [entry], **ends} if name is None else entry

    async def answer(self, dialect: Dialect, body: bytes) -> Reply:
        """Answer a request in wire form. A long request is read and tokenised beside the event loop.

        Args:
            dialect: the interface in which the request is written.
            body: JSON.

        Returns:
            The reply.

        Raises:
            ApiError: as `reply`; or the body is too long.
        """
        if len(body) > self.max_body_bytes:
            raise too_large(self.max_body_bytes)
        return await beside_loop(len(body), lambda: self.reply(dialect, parse_json(body)))

    def chat(self, body: Any) -> Reply:
        """Answer a body of /chat/completions. It is tokenised in this call; see `answer`.

        Returns:
            The reply.

        Raises:
            ApiError: the request is refused, here or before the first message.
        """
        return self.reply(CHAT, body)

    def completion(self, body: Any) -> Reply:
        """Answer a body of /completions. Errors are those of `chat`.

        Returns:
            The reply.
        """
        return self.reply(COMPLETION, body)

    def reply(self, dialect: Dialect, body: Any) -> Reply:
        """Answer a body in any dialect. It is tokenised in this call; see `answer`.

        Args:
            dialect: the interface in which the body is written.
            body: a JSON value.

        Returns:
            The reply.

        Raises:
            ApiError: the request is refused, here or before the first message.
        """
        try:
            request = dialect.read(body, self.model, self._gconfig)
            if self._is_sampling_fixed:
                fixed = {name: getattr(self._gconfig, name) for name in ("greedy", "temperature", "top_p", "top_k")}
                request = replace(request, gconfig=request.gconfig.new(**fixed))
            self._check_format(request)
            check_scores(request, hasattr(self.engine, "ascore"))
            prompts = self._prompts.of(request, self.recording.turns)
            check_num_scored(request, [len(prompt.token_ids) for prompt in prompts], self._limit)
        except TooManyTokens as error:
            raise _too_long(str(error)) from error
        except TemplateRefusal as error:
            raise ApiError(f"messages: {error}", param="messages", code="invalid_value") from error
        except DataError as error:
            raise ApiError(str(error), param=error.place or None, code="invalid_value") from error
        id, tokenizer = f"{dialect.prefix}{uuid.uuid4().hex}", self._prompts.tokenizer
        exchange = Exchange(request=request, prompts=prompts, model=self.model, tokenizer=tokenizer, id=id)
        return Reply(dialect, exchange, self._messages(dialect, exchange))

    def _check_format(self, request: ModelRequest) -> None:
        """Determine the format of tool calls before the first call is requested."""
        try:
            if request.may_call and self._tool_format is None:
                self._tool_format = self._find_format()
        except ConfigError as error:
            self.failure = error
            raise ApiError(f"tools: {error}", param="tools", code="unsupported_value") from error

    async def _messages(self, dialect: Dialect, exchange: Exchange) -> AsyncGenerator[dict[str, Any], None]:
        try:
            async with contextlib.aclosing(self._events(exchange)) as events:
                if exchange.request.is_stream:
                    async with contextlib.aclosing(dialect.stream(exchange, events)) as chunks:
                        async for message in chunks:
                            yield message
                else:
                    choices = [event async for event in events if isinstance(event, Choice)]
                    choices.sort(key=lambda choice: choice.index)
                    scores = await self._scores(exchange, choices)
                    yield await beside_loop(exchange.num_shown, dialect.whole, exchange, choices, scores)
        except BaseException as error:  # also GeneratorExit: the client will ask again, and must not count twice
            if isinstance(error, GeneratorExit) and len(exchange.delivered) == exchange.num_choices:
                raise
            for turn in exchange.turns:
                turn.is_aborted = True
            raise

    async def _events(self, exchange: Exchange) -> AsyncGenerator[Delta | Choice, None]:
        """Generate all choices.

        Yields deltas and choices, as they arrive.
        """
        gconfigs = [self._fitting(exchange.request, len(prompt.token_ids)) for prompt in exchange.prompts]
        num_choices = exchange.request.num_choices
        events: asyncio.Queue[Delta | Choice | Exception] = asyncio.Queue()

        async def choose(index: int) -> None:
            try:
                gconfig = gconfigs[index // num_choices]
                events.put_nowait(await self._choose(index, exchange, gconfig, events.put_nowait))
            except asyncio.CancelledError:
                events.put_nowait(_closed())  # if it was the session that ended, the client is told
                raise
            except Exception as error:
                events.put_nowait(error)

        if self._is_closed:
            raise _closed()
        tasks = [asyncio.create_task(choose(index)) for index in range(num_choices * len(gconfigs))]
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
                await _cancel(left)
            self._tasks.difference_update(tasks)

    async def _scores(self, exchange: Exchange, choices: Sequence[Choice]) -> list[PromptLogprobs] | None:
        """Return log-probabilities of the prompt and the answer of each choice, None if the request needs none."""
        if not exchange.request.needs_scores:
            return None
        room = None if self._limit is None else self._limit - 1  # a full context is scored but for its last token
        scores: list[PromptLogprobs] = []
        for part in slices([choice.turn.sequence[:room] for choice in choices]):
            if self._is_closed:
                raise _closed()
            try:
                scores += await self.engine.ascore(part, exchange.request.num_top)  # type: ignore[attr-defined]
            except Exception as error:
                raise self._error(error) from error
        return scores

    async def _choose(
        self, index: int, exchange: Exchange, gconfig: GenerationHyperparameters, say: Callable[[Delta], None]
    ) -> Choice:
        """Return one choice, generated from its first token to its last.

        `exchange`: the request; gets the choice's turn.
        """
        request, prompt = exchange.request, exchange.prompt(index)
        if not request.is_generating:  # no turn of the model, and not recorded
            turn = Turn(id=exchange.id, prompt_ids=prompt.token_ids, prompt_text=prompt.text, finish_reason="length")
            return Choice(index, turn, "", "")
        if gconfig.seed is not None and (sample := index % request.num_choices):
            gconfig = gconfig.new(seed=mix(gconfig.seed, -sample))  # samples of an item mix in numbers above 0
        form = self._tool_format if request.may_call else None
        ends = self._end_ids.union(gconfig.stop_token_ids)
        text = TextStream(exchange.tokenizer, gconfig.stop, form, request.tools, ends, prompt.text)
        turn = Turn(
            id=exchange.id if exchange.num_choices == 1 else f"{exchange.id}:{index}",
            prompt_ids=prompt.token_ids,
            prompt_text=prompt.text,
            parent=prompt.parent,
            messages=request.messages,
            tools=request.tools,
            end_ids=ends,
            is_aborted=True,
        )
        exchange.turns.append(turn)
        chunks: list[TokenChunk] = []  # what arrives after the end of this call is not read
        try:
            rid = self._rid if self._is_recording else exchange.id  # agents that are not recorded are many
            asked = LLMRequest(input_ids=list(prompt.token_ids), gconfig=gconfig, rid=rid)
            if request.is_stream:
                async with contextlib.aclosing(self.engine.stream(asked)) as stream:  # type: ignore[type-var]
                    async for chunk in stream:
                        chunks.append(chunk)
                        say(Delta(index, text.feed(chunk.token_ids, chunk.finish_reason), chunk))
            else:  # without a change of threads for each token
                await self.engine.agenerate(asked, chunks.append)
        finally:
            turn.take(chunks)
            if self._is_recording:
                self.recording.turns.append(turn)
        if turn.finish_reason == "abort":
            raise ApiError(f"the engine aborted the answer after {len(turn.output_ids)} tokens", 503, code="aborted")
        if not request.is_stream:
            text.feed(turn.output_ids, turn.finish_reason)
        content, calls, rest = await text.finish()
        turn.text, turn.stop_text = text.text, text.stop_text
        if request.is_chat:
            turn.answer = assistant_message(content, calls, self._call_numbers)
        turn.is_aborted = False
        return Choice(index, turn, content, rest)

    def _fitting(self, request: ModelRequest, num_prompt: int) -> GenerationHyperparameters:
        """Return the sampling parameters with the limit of tokens applied."""
        gconfig = request.gconfig
        if self._max_length is None or not request.is_generating:
            return gconfig
        room = self._max_length - num_prompt
        if room < 1:
            raise _too_long(f"the prompt has {num_prompt} tokens, and max_length={self._max_length} leaves no room")
        least, most = min(gconfig.min_new_tokens, room), min(gconfig.max_new_tokens, room)
        return gconfig.new(min_new_tokens=least, max_new_tokens=most)

    def _error(self, error: Exception) -> Exception:
        """Return an engine's error as the agent sees it."""
        if isinstance(error, DataError | ConfigError):
            # the engine alone knows its bound, and says it in words
            return _too_long(str(error)) if "max_model_len" in str(error) else ApiError(str(error))
        if isinstance(error, RliteError) and not isinstance(error, ApiError):
            self.failure = error
            return ApiError(f"the engine cannot serve: {error}", 503, code="engine_failed")
        return error


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)


def _closed() -> ApiError:
    return ApiError("the session has ended", 409, code="session_closed")


def too_large(num_bytes: int) -> ApiError:
    """Return the error for a request whose body is longer than the session reads."""
    message = f"the body is longer than {num_bytes} bytes, which is far more than the model's context holds"
    return ApiError(message, 413, code="context_length_exceeded")


def _too_long(message: str) -> ApiError:
    return ApiError(message, param="messages", code="context_length_exceeded")
