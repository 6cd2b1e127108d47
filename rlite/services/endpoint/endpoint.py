"""HTTP endpoint of sessions on loopback, for agents in any language or process; a token selects the session."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from rlite.imports import optional
from rlite.services.endpoint import generate
from rlite.services.endpoint.requests import ApiError, unexpected
from rlite.services.endpoint.responses import Reply
from rlite.services.endpoint.session import MAX_BODY_BYTES, AgentSession, too_large

with optional("the endpoint needs", "agents"):
    from aiohttp import web

    from rlite.services.endpoint.connections import Connection, Listener, listening

logger = logging.getLogger(__name__)

BODY_SECONDS = 60.0
"""seconds that a client has to send the body of a request"""

_Served = tuple[AgentSession, set[asyncio.Task[Any]]]
"""a session with its requests under way"""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Access:
    """Parameters with which an agent uses its session, named as in OpenAI's clients."""

    base_url: str
    api_key: str = field(repr=False)
    model: str


class AgentEndpoint:
    """HTTP server for sessions on a free port of 127.0.0.1, in the running event loop.

        async with AgentEndpoint() as endpoint, endpoint.serving(session) as access:
            client = AsyncOpenAI(base_url=access.base_url, api_key=access.api_key)

    It is open while any user is inside `async with`, or serves a session, in each event loop that uses it. It serves
    POST /v1/chat/completions, POST /v1/completions and GET /v1/models. A client that leaves ends its generation.
    Connections beyond the file descriptors wait; connections without a session's key are dropped.
    """

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        """connections that were dropped, by reason"""
        self._servers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Server] = WeakKeyDictionary()

    async def __aenter__(self) -> AgentEndpoint:
        await self._servers.setdefault(asyncio.get_running_loop(), _Server(self.dropped)).enter()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._servers[asyncio.get_running_loop()].leave()

    @contextlib.asynccontextmanager
    async def serving(self, session: AgentSession) -> AsyncIterator[Access]:
        """Serve a session inside the block; its requests under way end with the block.

        Yields:
            The agent's access.
        """
        async with self:
            server, token = self._servers[asyncio.get_running_loop()], secrets.token_urlsafe(32)
            requests: set[asyncio.Task[Any]] = set()
            server.sessions[_digest(token)] = session, requests
            try:
                yield Access(server.url, token, session.model)
            finally:
                del server.sessions[_digest(token)]
                for request in requests:
                    request.cancel()
                await asyncio.gather(*requests, return_exceptions=True)


class _Server:
    """Server of one event loop."""

    _listener: Listener

    def __init__(self, dropped: Counter[str]) -> None:
        self.sessions: dict[bytes, _Served] = {}
        self._dropped = dropped
        self._num_users = 0
        self._turn = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()

    async def enter(self) -> None:
        """Start the server for its first user."""
        async with self._turn:
            if not self._num_users:
                self._listener = await self._stack.enter_async_context(listening(self._app(), self._dropped))
            self._num_users += 1

    async def leave(self) -> None:
        """Stop the server after its last user."""
        async with self._turn:
            self._num_users -= 1
            if not self._num_users:
                await self._stack.aclose()

    @property
    def url(self) -> str:
        """Address for clients."""
        return f"http://127.0.0.1:{self._listener.port}/v1"

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app.add_routes([web.post(f"/v1{path}", self._answer) for path in ("/chat/completions", "/completions")])
        app.add_routes([web.post(generate.PATH, self._answer)])
        app.add_routes([web.get(f"/v1/models{name}", self._models) for name in ("", "/{model:.+}")])
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        (session, requests), task = self._served(request), asyncio.current_task()
        assert task is not None
        requests.add(task)
        try:
            with self._listener.busy(request.transport) as connection:
                body = await _body(request, session.max_body_bytes)
                reply = await session.answer(request.path.removeprefix("/v1"), body)
                return await _send(request, reply, connection, self._listener.is_full)
        finally:
            requests.discard(task)

    async def _models(self, request: web.Request) -> web.Response:
        session, _ = self._served(request)
        with self._listener.busy(request.transport):
            return web.json_response(session.models(request.match_info.get("model")))

    def _served(self, request: web.Request) -> _Served:
        """Return the session of a request's token.

        Raises:
            ApiError: the token is of no session.
        """
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        # looked up by its digest, so that the time it takes tells nothing of other tokens
        served = self.sessions.get(_digest(token))
        if scheme.lower() != "bearer" or served is None:
            raise ApiError("the API key is not that of a session under way", 401, code="invalid_api_key")
        return served


async def _body(request: web.Request, max_bytes: int) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: it is longer than `max_bytes` (before reading, if the length is announced), unreadable or late.
    """
    if (request.content_length or 0) > max_bytes:
        raise too_large(max_bytes)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.clone(client_max_size=max_bytes).read()
    except web.RequestPayloadError as error:
        raise ApiError(f"the body cannot be read: {error}", code="invalid_body") from error
    except TimeoutError as error:
        raise ApiError(f"the body did not arrive in {BODY_SECONDS:g} s", 408) from error
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large(max_bytes) from error


async def _send(request: web.Request, reply: Reply, connection: Connection, is_last: bool) -> web.StreamResponse:
    """Send a reply. The reply is read to its end only after all of it was flushed to a connected client.

    Args:
        request: the request.
        reply: the answer.
        connection: the client's connection.
        is_last: close the connection afterwards.

    Returns:
        The response.

    Raises:
        ConnectionResetError: the client has left.
        ApiError: the request is refused before anything was sent.
    """
    response = web.StreamResponse(headers={"Content-Type": reply.content_type, "Cache-Control": "no-cache"})
    if is_last:
        response.force_close()
    try:
        async with contextlib.aclosing(reply.encoded()) as parts:
            async for part in parts:
                reply.delivered.clear()  # here the end counts, when it was flushed
                connection.check_open()
                if not response.prepared:  # only now is it sure that the engine takes the prompt
                    if not reply.is_stream:
                        response.content_length = len(part)
                    await response.prepare(request)
                await response.write(part)
                await connection.flush()
    except Exception as error:
        if response.prepared and not isinstance(error, ConnectionError):  # a second response would be read as its body
            logger.exception("a request to %s failed after its response had begun", request.path)
            connection.transport.abort()
            raise ConnectionResetError("the response could not be finished") from error
        raise
    await response.write_eof()
    return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return errors in the form that OpenAI's clients read.

    Raises:
        ConnectionError: the client has left, and its turn counts as aborted.
    """
    try:
        return await handler(request)
    except ApiError as error:
        return _refusal(request, error)
    except web.HTTPException as error:
        return _refusal(request, ApiError(f"{request.method} {request.path}: {error.reason}", error.status))
    except ConnectionError:  # the client has gone, and its turn counts as aborted
        raise
    except Exception as error:
        logger.exception("a request to %s failed", request.path)
        return _refusal(request, unexpected(error))


def _refusal(request: web.Request, error: ApiError) -> web.Response:
    response = web.json_response(error.body(), status=error.status)
    is_read = request.content.is_eof() and request.content.exception() is None
    if error.status == 401 or not is_read:  # it may not keep a connection, or none can be kept
        response.force_close()
    return response


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
