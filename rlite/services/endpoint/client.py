"""Client of the `openai` package for a session in this process, without a server or sockets."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

from rlite.imports import optional
from rlite.services.endpoint.dialects.openai import error_body
from rlite.services.endpoint.dialects.table import DIALECTS
from rlite.services.endpoint.exchange import Reply
from rlite.services.endpoint.recording import RecordingOwner
from rlite.services.endpoint.requests import ApiError
from rlite.services.endpoint.session import AgentSession

with optional("the client in this process needs", "agents"):
    import openai

# the HTTP package that the installed openai is built on: httpx, or httpx2 in newer ones
_http: Any = sys.modules[openai.DefaultAsyncHttpxClient.__bases__[0].__module__.partition(".")[0]]
_BASE_URL = "http://session.invalid/v1"


class AgentClient(RecordingOwner, openai.AsyncOpenAI):
    """An `openai.AsyncOpenAI` that a session answers.

    Its methods for chats, completions, responses and models work, with their types and errors. Frameworks that accept
    the class accept this client. `model` is the name to ask for.

    Args:
        session: answers the requests.
        options: arguments of `openai.AsyncOpenAI`.
    """

    def __init__(self, session: AgentSession, **options: Any) -> None:
        if options.get("http_client") is None:
            transport = _SessionTransport(session)
            options["http_client"] = _http.AsyncClient(transport=transport, base_url=_BASE_URL, trust_env=False)
        super().__init__(**{"api_key": "in-process", "base_url": _BASE_URL, **options})
        self.session, self.recording = session, session.recording
        self.model = session.model

    def copy(self, **options: Any) -> AgentClient:
        """Return a client of the same session with other options, such as `max_retries`."""
        extra = {**options.pop("_extra_kwargs", {}), "session": self.session}
        return super().copy(**options, _extra_kwargs=extra)

    with_options = copy


class _SessionTransport(_http.AsyncBaseTransport):
    """Transport of requests to a session instead of a network."""

    def __init__(self, session: AgentSession) -> None:
        self._session = session

    async def handle_async_request(self, request: Any) -> Any:
        try:
            return await self._answer(request.method, request.url.path, await request.aread())
        except ApiError as error:
            return _http.Response(error.status, json=error_body(error), request=request)

    async def _answer(self, method: str, path: str, body: bytes) -> Any:
        match method, path:
            case "POST", asked if asked in DIALECTS:
                reply = await self._session.answer(DIALECTS[asked], body)
            case "GET", asked if asked.startswith("/v1/models"):
                name = asked.removeprefix("/v1/models").removeprefix("/")
                return _http.Response(200, json=self._session.models(name or None))
            case _:
                raise ApiError(f"{method} {path}: Not Found", 404)
        stream = _Body(reply)
        await stream.begin()
        return _http.Response(200, headers={"content-type": reply.content_type}, stream=stream)


class _Body(_http.AsyncByteStream):
    """A reply as the body of a response."""

    def __init__(self, reply: Reply) -> None:
        self._parts = reply.encoded()
        self._first = b""

    async def begin(self) -> None:
        """Wait for the first part. An ApiError here becomes the status of the response."""
        self._first = await anext(self._parts)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._first
        async for part in self._parts:
            yield part

    async def aclose(self) -> None:
        await self._parts.aclose()
