"""The HTTP server of the Tinker API, in the running event loop.

The routes are those that the client calls. Each needs a token, which selects the tenant.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from rlite.errors import DataError, RliteError
from rlite.imports import optional
from rlite.services.endpoint.exchange import log_failure
from rlite.services.endpoint.guard import Names, digest, token_of
from rlite.services.endpoint.requests import ApiError, parse_json
from rlite.services.tinker import bodies
from rlite.services.tinker.desk import QueueFull
from rlite.services.tinker.sampling_routes import SamplingRoutes
from rlite.services.tinker.shop import MAX_BODY, OWNER, ROOT, Shop, read
from rlite.services.tinker.tenants import UnknownName
from rlite.services.tinker.training_routes import TrainingRoutes
from rlite.services.tinker.weights_routes import WeightsRoutes
from rlite.services.tinker.wire import check_version

with optional("rlite tinker needs", "tinker"):
    from aiohttp import web

    from rlite.services.endpoint.connections import Listener, Words, listening
    from rlite.services.endpoint.endpoint import read_body

WORDS = Words("rlite tinker", "a token", "further ones are dropped without a message")
CONFIG = {
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
        for each in (TrainingRoutes, SamplingRoutes, WeightsRoutes):
            app.add_routes(each(self._shop).routes())
        app.add_routes(
            [
                web.get(f"{ROOT}/healthz", self._healthz),
                web.post(f"{ROOT}/client/config", self._config),
                web.post(f"{ROOT}/telemetry", self._telemetry),
                web.get(f"{ROOT}/get_server_capabilities", self._capabilities),
                web.post(f"{ROOT}/create_session", self._create_session),
                web.post(f"{ROOT}/session_heartbeat", self._session_heartbeat),
                web.post(f"{ROOT}/sessions/{{session}}/finish", self._finish),
                web.get(f"{ROOT}/sessions", self._sessions),
                web.get(f"{ROOT}/sessions/{{session}}", self._one_session),
            ]
        )
        self._shop.desk.recover()
        serving = listening(app, Counter(), self._port, WORDS, self._names.host)
        self._listener = await self._stack.enter_async_context(serving)
        self._work = asyncio.create_task(self._shop.desk.run())
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)
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
        except UnknownName as error:
            return _error(str(error), 404)
        except DataError as error:
            return _error(str(error), 400)
        except QueueFull as error:
            return _error(str(error), 429)
        except web.HTTPException as error:
            return _error(f"{request.method} {request.path}: {error.reason}", error.status)
        except RliteError as error:
            log_failure(f"a request to {request.path} failed", error)
            return _error(f"the server failed with {type(error).__name__}; its log has more", 503)

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _config(self, request: web.Request) -> web.Response:
        check_version(_text(await read_body(request, MAX_BODY), "sdk_version"))
        return web.json_response(CONFIG)

    async def _telemetry(self, request: web.Request) -> web.Response:
        """Return that nothing is kept of what the client tells of itself."""
        await read_body(request, MAX_BODY)
        return web.json_response({"status": "accepted"})

    async def _capabilities(self, request: web.Request) -> web.Response:
        length = self._shop.max_length
        model = {
            "model_name": self._shop.model_name,
            "max_context_length": length,
            "trainable": True,
            "sampleable": True,
        }
        return web.json_response({"supported_models": [model]})

    async def _create_session(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.NewSession)
        check_version(asked.sdk_version)
        session = self._shop.tenants.open_session(request[OWNER])
        told = "this server trains no adapter on the output embedding: train_unembed has no effect"
        answer = {"type": "create_session", "session_id": session.session_id, "info_message": told}
        return web.json_response(answer)

    async def _session_heartbeat(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.SessionBody)
        if self._shop.tenants.session(request[OWNER], asked.session_id).is_finished:
            raise ApiError("the session is finished", 410)
        return web.json_response({"type": "session_heartbeat"})

    async def _finish(self, request: web.Request) -> web.Response:
        session = self._shop.tenants.session(request[OWNER], request.match_info["session"])
        session.is_finished = True
        session.write()
        for model in list(session.models.values()):
            await self._shop.desk.offload(model)
        return web.json_response({"type": "finish_session"})

    async def _sessions(self, request: web.Request) -> web.Response:
        own = [name for name, session in self._shop.tenants.sessions.items() if session.owner == request[OWNER]]
        return web.json_response({"sessions": own})

    async def _one_session(self, request: web.Request) -> web.Response:
        session = self._shop.tenants.session(request[OWNER], request.match_info["session"])
        samplers = [sampler.sampler_id for sampler in session.samplers.values()]
        runs = [model.model_id for model in session.models.values()]
        return web.json_response({"training_run_ids": runs, "sampler_ids": samplers})


def _text(body: bytes, key: str) -> str:
    value = parse_json(body) if body else {}
    return str(value.get(key) or "") if isinstance(value, dict) else ""


def _error(message: str, status: int) -> web.Response:
    headers = {"Retry-After": "1"} if status == 429 else None
    response = web.json_response({"detail": message, "error": message}, status=status, headers=headers)
    if status == 401:
        response.force_close()
    return response
