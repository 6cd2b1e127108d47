"""The server of the pages: this machine alone, with a secret token, and for the given runs alone."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from rlite.errors import ConfigError, DataError
from rlite.imports import optional
from rlite.viewer.answers import OF_TRACE, Query, UnknownPlace, answer
from rlite.viewer.export import TYPES, assets, served_page
from rlite.viewer.run import Change, ViewedRun

with optional("the page needs", "view", "; or write it to a file: --export FILE.html"):
    from aiohttp import web

    from rlite.services.endpoint.connections import Words, listening

WORDS = Words("rlite view", "the token", "further ones are dropped without a message")
ADDRESS = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""names of this machine; another name in a request is of a page that rebound its own name to this address"""
COOKIE = "rlite-view"
LOOK_EVERY_S = 2.0
TRACE_EVERY_S = 10.0
"""least seconds between two messages about a trace, which grows all the time and is long"""
KEEP_ALIVE_S = 15.0
MAX_STREAMS = 32
"""pages that receive news of changes"""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


class PageServer:
    """Serves the pages of some runs until it is left. An asynchronous context manager.

    Args:
        runs: the runs.
        port: port on this machine; 0 takes a free one.
    """

    def __init__(self, runs: Sequence[ViewedRun], port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self._runs, self._port = runs, port
        self._page, self._policy = served_page()
        self._assets = assets()
        self._reader = ThreadPoolExecutor(1, "reader")  # one thread, so runs need no locks
        self._trace_reader = ThreadPoolExecutor(1, "trace reader")  # a long trace keeps only its own page waiting
        self._num_changes: dict[Change, int] = {"run": 0, "trace": 0}
        self._num_streams = 0
        self._changed = asyncio.Condition()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> PageServer:
        app = web.Application(client_max_size=1024, middlewares=[self._guard])
        app.add_routes([web.get("/", self._index), web.get("/static/{name:.+}", self._asset)])
        app.add_routes([web.get("/api/{name}", self._answer), web.get("/events", self._events)])
        serving = listening(app, Counter(), self._port, WORDS)
        try:
            self._listener = await self._stack.enter_async_context(serving)
        except OSError as error:
            raise ConfigError(f"port={self._port}: cannot be used: {error.strerror or error}") from error
        self._port = self._listener.port
        self._watch = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._stack.aclose()
        for reader in (self._reader, self._trace_reader):
            reader.shutdown(cancel_futures=True)

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        return f"http://{ADDRESS}:{self._port}/?token={self.token}"

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Return the answer with its headers. Requests to another name, or without the token, are refused."""
        try:
            self._check(request)
            with self._listener.busy(request.transport):
                response = await handler(request)
            if self._listener.is_full:  # the place is another client's turn
                response.force_close()
        except web.HTTPException as error:
            response = web.json_response({"error": error.text or error.reason}, status=error.status)
        if not response.prepared:
            response.headers.update({**HEADERS, "Content-Security-Policy": self._policy})
        return response

    def _check(self, request: web.Request) -> None:
        """Check that a request is for this machine and has the token.

        Raises:
            HTTPForbidden: the request is for another name.
            HTTPUnauthorized: the token is wrong or missing.
        """
        if request.host.rpartition(":")[0] not in HOSTS and request.host not in HOSTS:
            raise web.HTTPForbidden(text="this page is served to its own machine alone")
        told = (request.query.get("token"), request.cookies.get(self._cookie), request.headers.get("X-Token"))
        given = next(filter(None, told), "")
        if not hmac.compare_digest(given.encode(errors="replace"), self.token.encode()):
            raise web.HTTPUnauthorized(text="wrong or missing token: open the address that `rlite view` has printed")

    @property
    def _cookie(self) -> str:
        return f"{COOKIE}-{self._port}"  # cookies do not tell ports apart

    async def _index(self, request: web.Request) -> web.Response:
        """Return the page. A token in the address becomes a cookie, so that it is in no history."""
        if "token" in request.query:
            moved = web.Response(status=302, headers={"Location": "/"})
            moved.set_cookie(self._cookie, self.token, httponly=True, samesite="Lax", path="/")
            return moved
        return web.Response(text=self._page, content_type="text/html")

    async def _asset(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._assets:
            raise web.HTTPNotFound(text=f"no file {name[:80]}")
        return web.Response(body=self._assets[name], content_type=TYPES[name[name.rindex(".") :]], charset="utf-8")

    async def _answer(self, request: web.Request) -> web.Response:
        name, query = request.match_info["name"], Query(request.query.items())
        reader = self._trace_reader if name in OF_TRACE else self._reader
        try:
            text = await _in(reader, lambda: json.dumps(answer(self._runs, name, query), allow_nan=False))
        except DataError as error:
            return web.json_response({"error": str(error)}, status=404 if isinstance(error, UnknownPlace) else 400)
        return web.Response(text=text, content_type="application/json")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Return a stream that tells a page of changes, as server-sent events. The first is sent at once.

        Raises:
            HTTPServiceUnavailable: too many pages are open.
        """
        if self._num_streams >= MAX_STREAMS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_STREAMS} pages are open; close some")
        stream = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        self._num_streams += 1
        try:
            await stream.prepare(request)
            seen = {**self._num_changes, "run": -1}  # what changed before a page has connected is news to it
            while True:
                await self._wait_for_change(seen)
                now = dict(self._num_changes)
                news = [f"data: {number}\nevent: {kind}\n\n" for kind, number in now.items() if number != seen[kind]]
                await stream.write("".join(news or [": nothing new\n\n"]).encode())
                seen = now
        except ConnectionResetError:
            return stream
        finally:
            self._num_streams -= 1

    async def _wait_for_change(self, seen: Mapping[Change, int]) -> None:
        async with self._changed:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._num_changes != seen), KEEP_ALIVE_S)

    async def _look(self) -> None:
        """Look for changes that other processes have made in the runs' folders."""
        news: set[Change] = set()
        trace_due = 0.0
        while True:
            for run in self._runs:
                news |= await _in(self._reader, run.refresh)
            now = asyncio.get_running_loop().time()
            told = news if now >= trace_due else news - {"trace"}
            if "trace" in told:
                trace_due = now + TRACE_EVERY_S
            if told:
                async with self._changed:
                    for kind in told:
                        self._num_changes[kind] += 1
                    self._changed.notify_all()  # wakes the streams of all pages
            news = news - told
            await asyncio.sleep(LOOK_EVERY_S)


async def _in(reader: ThreadPoolExecutor, act: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(reader, act)


async def serve(runs: Sequence[ViewedRun], port: int, tell: Callable[[str], Any]) -> None:
    """Serve the pages of runs until SIGINT or SIGTERM. For the main thread.

    Args:
        runs: the runs.
        port: port on this machine; 0 takes a free one.
        tell: called with the address when the page can be opened.
    """
    is_over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, is_over.set)
    async with PageServer(runs, port) as server:
        tell(server.url)
        await is_over.wait()
