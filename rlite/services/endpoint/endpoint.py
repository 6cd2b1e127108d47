"""HTTP endpoint of sessions, for agents in any language or process; a token selects the session."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from rlite.errors import WorkerError
from rlite.imports import optional
from rlite.services.endpoint.admin import ROUTE, Admin
from rlite.services.endpoint.dialects.table import DIALECTS, dialect_of
from rlite.services.endpoint.exchange import Reply, log_failure
from rlite.services.endpoint.guard import Gate, Limits, Names, digest, token_of
from rlite.services.endpoint.requests import ApiError, unexpected
from rlite.services.endpoint.session import MAX_BODY_BYTES, AgentSession, too_large

with optional("the endpoint needs", "agents"):
    from aiohttp import web

    from rlite.services.endpoint.connections import AGENTS, LOOPBACK, Connection, Listener, Words, listening

LOCAL, UNLIMITED = Names(LOOPBACK), Limits()
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

    @property
    def root(self) -> str:
        """Address without /v1, as Anthropic's clients and those of /inference/v1/generate want it."""
        return self.base_url.removesuffix("/v1")


class AgentEndpoint:
    """HTTP server for sessions, in the running event loop.

        async with AgentEndpoint() as endpoint, endpoint.serving(session) as access:
            client = AsyncOpenAI(base_url=access.base_url, api_key=access.api_key)

    It is open while any user is inside `async with`, or serves a session, in each event loop that uses it. It serves
    the routes of `rlite.services.endpoint.dialects`, GET /v1/models and GET /health, which alone needs no key. A client
    that leaves ends its generation. Connections beyond the file descriptors wait; connections without a session's key
    are dropped.

    Args:
        port: port to listen on; 0 takes a free one.
        names: the address to listen on, by default this machine alone, and further names of it.
        limits: requests that run and wait at a time.
        words: names in messages.
        admin: serves POST /admin/weights; None leaves the route out.
    """

    def __init__(
        self,
        port: int = 0,
        names: Names = LOCAL,
        limits: Limits = UNLIMITED,
        words: Words = AGENTS,
        admin: Admin | None = None,
    ) -> None:
        self.dropped: Counter[str] = Counter()
        """connections that were dropped, by reason"""
        listen = partial(listening, dropped=self.dropped, port=port, words=words, host=names.host)
        self._make_server = partial(_Server, listen, names, limits, admin)
        self._servers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Server] = WeakKeyDictionary()

    async def __aenter__(self) -> AgentEndpoint:
        await self._servers.setdefault(asyncio.get_running_loop(), self._make_server()).enter()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._servers[asyncio.get_running_loop()].leave()

    @contextlib.asynccontextmanager
    async def serving(self, session: AgentSession, token: str | None = None) -> AsyncIterator[Access]:
        """Serve a session inside the block; its requests under way end with the block.

        Args:
            session: answers the requests.
            token: the key that selects the session; None draws one.

        Yields:
            The agent's access.
        """
        async with self:
            server, token = self._servers[asyncio.get_running_loop()], token or secrets.token_urlsafe(32)
            requests: set[asyncio.Task[Any]] = set()
            server.sessions[digest(token)] = session, requests
            try:
                yield Access(server.url, token, session.model)
            finally:
                del server.sessions[digest(token)]
                for request in requests:
                    request.cancel()
                await asyncio.gather(*requests, return_exceptions=True)


class _Server:
    """Server of one event loop."""

    _listener: Listener

    def __init__(self, listen: Any, names: Names, limits: Limits, admin: Admin | None) -> None:
        self.sessions: dict[bytes, _Served] = {}
        self._listen, self._gate, self._names, self._admin = listen, Gate(limits), names, admin
        self._num_users = 0
        self._turn = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()

    async def enter(self) -> None:
        """Start the server for its first user."""
        async with self._turn:
            if not self._num_users:
                self._listener = await self._stack.enter_async_context(self._listen(self._app()))
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
        host = f"[{self._names.host}]" if ":" in self._names.host else self._names.host
        return f"http://{host}:{self._listener.port}/v1"

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._errors])
        app.add_routes([web.post(path, self._answer) for path in DIALECTS])
        app.add_routes([web.get(f"/v1/models{name}", self._models) for name in ("", "/{model:.+}")])
        app.add_routes([web.get("/health", self._health)])
        if self._admin is not None:
            app.add_routes([web.post(ROUTE, partial(self._administer, self._admin))])
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        (session, requests), task = self._served(request), asyncio.current_task()
        assert task is not None
        requests.add(task)
        try:
            with self._listener.busy(request.transport) as connection:
                async with self._gate.place():
                    body = await read_body(request, session.max_body_bytes)
                    reply = await session.answer(DIALECTS[request.path], body)
                    return await _send(request, reply, connection, self._listener.is_full)
        finally:
            requests.discard(task)

    async def _models(self, request: web.Request) -> web.Response:
        session, _ = self._served(request)
        with self._listener.busy(request.transport):
            return web.json_response(session.models(request.match_info.get("model")))

    async def _administer(self, admin: Admin, request: web.Request) -> web.Response:
        """Load weights for the administrator, whose token is none of a session."""
        admin.check(token_of(request.headers))
        with self._listener.busy(request.transport):
            return web.json_response(await admin.load(await read_body(request, MAX_BODY_BYTES)))

    async def _health(self, request: web.Request) -> web.Response:
        """Return whether the engine lives. No other route is open without a token."""
        is_dead = any(isinstance(session.failure, WorkerError) for session, _ in self.sessions.values())
        return web.json_response({"status": "failed" if is_dead else "ok"}, status=503 if is_dead else 200)

    def _served(self, request: web.Request) -> _Served:
        """Return the session of a request's token."""
        # looked up by its digest, so that the time it takes tells nothing of other tokens
        served = self.sessions.get(digest(token_of(request.headers)))
        if served is None:
            raise ApiError("the API key is not that of a session under way", 401, code="invalid_api_key")
        return served

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Return errors in the form that the route's clients read. Requests for other names are refused."""
        try:
            self._names.check(request.headers)
            if request.path not in ("/health", ROUTE):
                self._served(request)  # also for routes that do not exist
            return await handler(request)
        except ApiError as error:
            return _refusal(request, error)
        except web.HTTPException as error:
            return _refusal(request, ApiError(f"{request.method} {request.path}: {error.reason}", error.status))
        except ConnectionError:  # the client has gone, and its turn counts as aborted
            raise
        except Exception as error:
            log_failure(f"a request to {request.path} failed", error)
            return _refusal(request, unexpected(error))


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """Return the body of a request."""
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
    """Send a reply. The reply is read to its end only after all of it was flushed to a connected client."""
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
            log_failure(f"a request to {request.path} failed after its response had begun", error)
            connection.transport.abort()
            raise ConnectionResetError("the response could not be finished") from error
        raise
    await response.write_eof()
    return response


def _refusal(request: web.Request, error: ApiError) -> web.Response:
    headers = {"Retry-After": "1"} if error.status == 429 else None
    response = web.json_response(dialect_of(request.path).error(error), status=error.status, headers=headers)
    is_read = request.content.is_eof() and request.content.exception() is None
    if error.status == 401 or not is_read:  # it may not keep a connection, or none can be kept
        response.force_close()
    return response
