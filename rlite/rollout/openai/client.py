"""Client of the `openai` package for a session in this process, without a server or sockets."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from rlite.errors import ConfigError
from rlite.rollout.openai.recording import Style
from rlite.rollout.openai.requests import ApiError
from rlite.rollout.openai.responses import description, server_sent_events
from rlite.rollout.openai.session import AgentSession

try:
    import openai
except ModuleNotFoundError as error:
    raise ConfigError("the client in this process needs the package openai: pip install 'rlite[agents]'") from error

# the HTTP package that the installed openai is built on: httpx, or httpx2 in newer ones
_http: Any = sys.modules[openai.DefaultAsyncHttpxClient.__bases__[0].__module__.partition(".")[0]]
_BASE_URL = "http://session.invalid/v1"


class AgentClient(openai.AsyncOpenAI):
    """An `openai.AsyncOpenAI` that a session answers.

    Its methods for chats, completions and models work, with their types and errors. Frameworks that accept the class
    accept this client. `model` is the name to ask for.

    Args:
        session: answers the requests.
        options: arguments of `openai.AsyncOpenAI`.
    """

    def __init__(self, session: AgentSession, **options: Any) -> None:
        if options.get("http_client") is None:
            transport = _SessionTransport(session)
            options["http_client"] = _http.AsyncClient(transport=transport, base_url=_BASE_URL, trust_env=False)
        super().__init__(**{"api_key": "in-process", "base_url": _BASE_URL, **options})
        self.session = session
        self.model = session.model

    def copy(self, **options: Any) -> AgentClient:
        """Return a client of the same session with other options, such as `max_retries`."""
        return super().copy(
            **{**options, "_extra_kwargs": {**options.get("_extra_kwargs", {}), "session": self.session}}
        )

    with_options = copy

    def set_reward(self, interaction_id: str, reward: float) -> None:
        """Set the reward of the answer with this id. See `AgentSession.set_reward`."""
        self.session.set_reward(interaction_id, reward)

    def set_last_reward(self, reward: float) -> None:
        """Set the reward of the latest answer."""
        self.session.set_last_reward(reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Let earlier answers share in later rewards. See `Recording.apply_reward_discount`."""
        self.session.apply_reward_discount(turn_discount)

    def export(self, style: Style = "concat", include_aborted: bool = False) -> Any:
        """Return the trajectory of the session. See `rlite.rollout.openai.recording.export`."""
        return self.session.export(style, include_aborted)


class _SessionTransport(_http.AsyncBaseTransport):
    """Transport of requests to a session instead of a network."""

    def __init__(self, session: AgentSession) -> None:
        self._session = session

    async def handle_async_request(self, request: Any) -> Any:
        try:
            return await self._answer(request.method, request.url.path, await request.aread())
        except ApiError as error:
            return _http.Response(error.status, json=error.body(), request=request)

    async def _answer(self, method: str, path: str, body: bytes) -> Any:
        match method, path.removeprefix("/v1"):
            case "POST", "/chat/completions" | "/completions" as asked:
                reply = await self._session.answer(asked, body)
            case "GET", "/models":
                return _http.Response(200, json={"object": "list", "data": [description(self._session.model)]})
            case "GET", other if other == f"/models/{self._session.model}":
                return _http.Response(200, json=description(self._session.model))
            case _:
                raise ApiError(f"{method} {path}: Not Found", 404)
        if reply.is_stream:
            stream = _Events(reply.messages)
            await stream.begin()
            return _http.Response(200, headers={"content-type": "text/event-stream"}, stream=stream)
        async with contextlib.aclosing(reply.messages) as messages:
            [message] = [message async for message in messages]
        return _http.Response(200, json=message)


class _Events(_http.AsyncByteStream):
    """A reply as server-sent events."""

    def __init__(self, messages: AsyncGenerator[dict[str, Any], None]) -> None:
        self._events = server_sent_events(messages)
        self._first = b""

    async def begin(self) -> None:
        """Wait for the first event. An ApiError here becomes the status of the response."""
        self._first = await anext(self._events)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._first
        async for event in self._events:
            yield event

    async def aclose(self) -> None:
        await self._events.aclose()
