"""The HTTP server of the Tinker API, in the running event loop.

The routes are those that the client calls. Each needs a token, which selects the tenant.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rlite.errors import DataError, RliteError
from rlite.imports import optional
from rlite.services.endpoint.exchange import log_failure
from rlite.services.endpoint.guard import Names, digest, token_of
from rlite.services.endpoint.requests import ApiError
from rlite.services.tinker import bodies, sampling_routes, training_routes, weights_routes
from rlite.services.tinker.routes import MAX_BODY, OWNER, ROOT, Answer, Routes, Shop
from rlite.services.tinker.status import keep_status
from rlite.services.tinker.tenants import UnknownName
from rlite.services.tinker.wire import check_version

with optional("rlite tinker needs", "tinker"):
    from aiohttp import web

    from rlite.services.endpoint.connections import Listener, Words, listening

WORDS = Words("rlite tinker", "a token", "further ones are dropped without a message")
CONFIG: dict[str, Any] = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 5_000_000,
    "sample_max_concurrent_requests": 2000,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": True,
}
ROUTES = Routes()
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TinkerServer:
    """Answers clients. An asynchronous context manager.

    Args:
        shop: what the routes work with.
        tokens: tenant -> token.
        names: the address, and further names of this machine.
        port: port to listen on; 0 takes a free one.
    """

    def __init__(self, shop: Shop, tokens: Mapping[str, str], names: Names, port: int = 0) -> None:
        self._shop, self._names, self._port = shop, names, port
        self._owners = {digest(token): owner for owner, token in tokens.items()}
        self._stack = contextlib.AsyncExitStack()
        self._listener: Listener

    async def __aenter__(self) -> TinkerServer:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        for routes in (ROUTES, training_routes.ROUTES, sampling_routes.ROUTES, weights_routes.ROUTES):
            app.add_routes(routes.bound(self._shop))
        self._shop.desk.recover()
        serving = listening(app, Counter(), self._port, WORDS, self._names.host)
        self._listener = await self._stack.enter_async_context(serving)
        self._tasks = [asyncio.create_task(each) for each in (self._shop.desk.run(), keep_status(self._shop))]
        return self

    async def __aexit__(self, *raised: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._shop.samples.close()
        await self._stack.aclose()
        await self._shop.desk.close()

    @property
    def url(self) -> str:
        """Address for clients."""
        host = f"[{self._names.host}]" if ":" in self._names.host else self._names.host
        return f"http://{host}:{self._listener.port}"

    # -- guard ---------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Return the answer, or an error in the API's form.

        Raises:
            ApiError: the request is for another name, or without a token; it is answered, too.
        """
        try:
            self._names.check(request.headers)
            if request.path == f"{ROOT}/healthz":
                return await handler(request)
            owner = self._owners.get(digest(token_of(request.headers)))
            if owner is None:
                raise ApiError("the API key is none of this server's tokens", 401)
            request[OWNER] = owner
            with self._listener.busy(request.transport):
                response = await handler(request)
                if self._listener.is_full:
                    response.force_close()
                return response
        except ApiError as error:
            return _error(error.told, error.status)
        except DataError as error:
            return _error(str(error), 404 if isinstance(error, UnknownName) else 400)
        except web.HTTPException as error:
            return _error(f"{request.method} {request.path}: {error.reason}", error.status)
        except RliteError as error:
            log_failure(f"a request to {request.path} failed", error)
            return _error(f"the server failed with {type(error).__name__}; its log has more", 503)


@ROUTES("GET", "healthz")
async def _healthz(shop: Shop, owner: str, asked: bodies.Body) -> Answer:
    return {"status": "ok"}


@ROUTES("POST", "client/config", bodies.Client)
async def _config(shop: Shop, owner: str, asked: bodies.Client) -> Answer:
    check_version(asked.sdk_version or "")
    return CONFIG


@ROUTES("POST", "telemetry")
async def _telemetry(shop: Shop, owner: str, asked: bodies.Body) -> Answer:
    """Return that nothing is kept of what the client tells of itself."""
    return {"status": "accepted"}


@ROUTES("GET", "get_server_capabilities")
async def _capabilities(shop: Shop, owner: str, asked: bodies.Body) -> Answer:
    model = {"model_name": shop.model_name, "max_context_length": shop.max_length}
    return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}


@ROUTES("POST", "create_session", bodies.Client)
async def _create_session(shop: Shop, owner: str, asked: bodies.Client) -> Answer:
    check_version(asked.sdk_version or "")
    told = "this server trains no adapter on the output embedding: train_unembed has no effect"
    session_id = shop.tenants.open_session(owner).session_id
    return {"type": "create_session", "session_id": session_id, "info_message": told}


@ROUTES("POST", "session_heartbeat", bodies.SessionBody)
async def _session_heartbeat(shop: Shop, owner: str, asked: bodies.SessionBody) -> Answer:
    if shop.tenants.session(owner, asked.session_id).is_finished:
        raise ApiError("the session is finished", 410)
    return {"type": "session_heartbeat"}


@ROUTES("POST", "sessions/{session_id}/finish", bodies.SessionBody)
async def _finish(shop: Shop, owner: str, asked: bodies.SessionBody) -> Answer:
    session = shop.tenants.session(owner, asked.session_id)
    session.is_finished = True
    session.write()
    for model in list(session.models.values()):
        await shop.desk.offload(model)
    return {"type": "finish_session"}


@ROUTES("GET", "sessions", bodies.Page)
async def _sessions(shop: Shop, owner: str, asked: bodies.Page) -> Answer:
    own = [name for name, session in shop.tenants.sessions.items() if session.owner == owner]
    return {"sessions": own[::-1][asked.offset : asked.offset + asked.limit]}


@ROUTES("GET", "sessions/{session_id}", bodies.SessionBody)
async def _session(shop: Shop, owner: str, asked: bodies.SessionBody) -> Answer:
    session = shop.tenants.session(owner, asked.session_id)
    samplers = [sampler.sampler_id for sampler in session.samplers.values()]
    return {"training_run_ids": [own.model_id for own in session.models.values()], "sampler_ids": samplers}


def _error(message: str, status: int) -> web.Response:
    headers = {"Retry-After": "1"} if status == 429 else None
    response = web.json_response({"detail": message, "error": message}, status=status, headers=headers)
    if status == 401:
        response.force_close()
    return response
