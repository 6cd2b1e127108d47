"""Connections to a server, limited by file descriptors. Clients that send nothing lose their connection.

            listening socket ──accept──> silent ──a request with a token──> busy <──> idle
    (full: further ones wait there)        │                                           │
                                           └──> dropped after HEADER_SECONDS,          └──> dropped if others wait,
                                                or IDLE_SECONDS if others wait              after IDLE_SECONDS

The agent endpoint, `rlite serve` and `rlite view` listen so. While a server is full, connections are closed with their
answers, so that waiting clients get their turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rlite.errors import ConfigError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
BACKLOG = 4096
"""connections that may wait to be taken: as many agents as begin at once"""
MAX_CONNECTIONS = 8192
MIN_CONNECTIONS = 32
HEADER_SECONDS = 10.0
"""seconds until a request with a session's token must have arrived"""
IDLE_SECONDS = 5.0
"""seconds that a client may be idle, before its first request or between two, while others wait"""
WANTED_FILES = 65536
"""the soft limit of file descriptors is raised to this, if the hard limit allows it"""
RETRY_SECONDS = 0.02
"""pause until the next attempt to take a connection after a failed one, which returns without waiting"""
LINGER_SECONDS = 2.0
"""seconds for which an unread body is discarded, so that the client reads the reason"""
CLOSE_SECONDS = 1.0
"""seconds that open connections have when the server closes"""


@dataclass(frozen=True)
class Words:
    """Names and advice in the messages of a server."""

    owner: str
    secret: str
    """name of the token"""
    advice: str
    """end of the message about the first connection or request that is dropped for a reason"""
    of_connections: str = ""
    """further advice about connections"""


AGENTS = Words(
    "the agent endpoint",
    "a session's key",
    "further ones are counted in AgentEndpoint.dropped",
    ". If agents need more connections at once, raise the limit of open files (ulimit -n) before the start",
)

_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connection(asyncio.Protocol):
    """One client's connection; `inner` speaks HTTP on it."""

    transport: asyncio.Transport
    since: float
    """time of the beginning or of the last activity, by the loop's clock"""
    _timer: asyncio.TimerHandle

    def __init__(self, owner: Listener, inner: asyncio.Protocol) -> None:
        self._owner, self._inner = owner, inner
        self.is_trusted = False
        """a request with a session's token has arrived"""
        self.has_asked = False
        """the head of a request has arrived that is not yet answered"""
        self._is_flushed = asyncio.Event()
        self._is_flushed.set()
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the connection's timer."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.transport.set_write_buffer_limits(high=0)  # what was not handed to the system yet holds writers
        self._owner.began(self)
        loop = asyncio.get_running_loop()
        self.since = loop.time()
        self._timer = loop.call_later(self._owner.header_seconds, self._owner.time_out, self)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._timer.cancel()
        self._is_flushed.set()
        self._owner.ended(self)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass data on, and note whether the head of a request has arrived."""
        self.has_asked |= b"\r\n\r\n" in self._tail + data
        self._tail = data[-3:]
        self._inner.data_received(data)

    def answered(self) -> None:
        """Wait for the next request."""
        self.has_asked, self._tail = False, b""
        self.since = asyncio.get_running_loop().time()

    @property
    def useless_at(self) -> float:
        """Time, by the loop's clock, from which another connection may take the place of this one."""
        return math.inf if self.has_asked else self.since + IDLE_SECONDS

    def eof_received(self) -> bool | None:
        """Return what the inner protocol answers to the end of the client's data."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Make writers wait."""
        self._is_flushed.clear()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Let writers continue."""
        self._is_flushed.set()
        self._inner.resume_writing()

    async def flush(self) -> None:
        """Wait until everything written has been handed to the system."""
        await self._is_flushed.wait()
        if self.transport.is_closing():
            raise ConnectionResetError("the client has left before the end of its answer")

    def check_open(self) -> None:
        """Check that the client is still connected, even if the event loop has not noticed its end yet."""
        if self.transport.is_closing() or _has_ended(self.transport.get_extra_info("socket").fileno()):
            raise ConnectionResetError("the client has left before the end of its answer")


class Listener:
    """Listening socket in the running event loop.

    `capacity`: simultaneous connections; further ones wait in the socket's queue. None: as file descriptors allow.
    `port`: port to listen on; 0 takes a free one. `host`: address to listen on; by default this machine alone can
    connect.
    """

    def __init__(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        dropped: Counter[str],
        capacity: int | None = None,
        header_seconds: float = HEADER_SECONDS,
        port: int = 0,
        words: Words = AGENTS,
        host: str = LOOPBACK,
    ) -> None:
        self.capacity = find_capacity(words.owner) if capacity is None else capacity
        self.header_seconds = header_seconds
        self._make_protocol, self._dropped, self._words = make_protocol, dropped, words
        self._open: dict[asyncio.BaseTransport, Connection] = {}
        self._changed = asyncio.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._task = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Accept no further connections; open ones stay."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()

    @contextlib.contextmanager
    def busy(self, transport: asyncio.BaseTransport | None) -> Iterator[Connection]:
        """Mark a connection, on which a token has arrived, as busy while its request is answered inside the block."""
        connection = None if transport is None else self._open.get(transport)
        if connection is None:
            raise ConnectionResetError("the client has left")
        connection.is_trusted = connection.has_asked = True
        try:
            yield connection
        finally:
            connection.answered()
            self._changed.set()

    @property
    def is_full(self) -> bool:
        """True if further connections wait, or soon will."""
        return len(self._open) >= self.capacity

    def began(self, connection: Connection) -> None:
        """Count a connection."""
        self._open[connection.transport] = connection

    def time_out(self, connection: Connection) -> None:
        """Drop a connection whose time is over, unless it is trusted."""
        if not connection.is_trusted:
            self._drop(connection, f"no request with {self._words.secret} in {self.header_seconds:g} s")

    def ended(self, connection: Connection) -> None:
        """Forget a connection."""
        self._open.pop(connection.transport, None)
        self._changed.set()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                if error.errno in _OUT_OF_FILES:  # the process has opened others meanwhile
                    await self._make_room(len(self._open))
                await asyncio.sleep(RETRY_SECONDS)  # else the event loop would do nothing else
                continue
            try:
                await self._make_room(self.capacity)
                await loop.connect_accepted_socket(lambda: Connection(self, self._make_protocol()), accepted)
            except BaseException as error:
                accepted.close()
                if not isinstance(error, OSError):  # else it has gone already
                    raise

    async def _make_room(self, capacity: int) -> None:
        """Wait until fewer than `capacity` connections are open, and drop connections that do nothing for too long."""
        loop = asyncio.get_running_loop()
        while len(self._open) >= max(capacity, 1):
            oldest = min(self._open.values(), key=lambda connection: connection.useless_at)
            seconds = oldest.useless_at - loop.time()
            if seconds > 0:
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), None if math.isinf(seconds) else seconds)
                continue
            what = "idle" if oldest.is_trusted else "without a request so far"
            self._drop(oldest, f"{what}, while all {self.capacity} connections were taken")
            await asyncio.sleep(0)  # its descriptor is closed by the loop

    def _drop(self, connection: Connection, reason: str) -> None:
        self._dropped[reason] += 1
        if self._dropped[reason] == 1:
            advice = self._words.advice + self._words.of_connections
            logger.warning("%s dropped a connection: %s; %s", self._words.owner, reason, advice)
        self.ended(connection)
        connection.transport.abort()


class RefusalLog(logging.LoggerAdapter[logging.Logger]):
    """Log of aiohttp with one line for each kind of unreadable request: anyone who reaches the port can send them.

    `dropped`: counts unreadable requests by kind; aiohttp closes their connections.
    """

    def __init__(self, dropped: Counter[str], words: Words) -> None:
        super().__init__(logger)
        self._dropped, self._words = dropped, words

    def exception(self, msg: object, *args: object, exc_info: Any = True, **options: Any) -> None:
        """Count a request that is not HTTP; log any other exception."""
        if not isinstance(exc_info, HttpProcessingError):
            super().exception(msg, *args, exc_info=exc_info, **options)
            return
        reason = f"a request that cannot be read ({type(exc_info).__name__})"
        if not self._dropped[reason]:
            self.warning("%s got %s; %s", self._words.owner, reason, self._words.advice)
        self._dropped[reason] += 1


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, dropped: Counter[str], port: int = 0, words: Words = AGENTS, host: str = LOOPBACK
) -> AsyncIterator[Listener]:
    """Serve an application inside the block.

    `port`: port to listen on; 0 takes a free one. `host`: address to listen on; by default this machine alone can
    connect.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=RefusalLog(dropped, words),
        shutdown_timeout=CLOSE_SECONDS,
        lingering_time=LINGER_SECONDS,
    )
    await runner.setup()
    assert runner.server is not None
    try:
        listener = Listener(runner.server, dropped, port=port, words=words, host=host)
        try:
            yield listener
        finally:
            await listener.close()
    finally:
        await runner.cleanup()


def _has_ended(descriptor: int) -> bool:
    """Return True if the other side of a socket has closed or reset it."""
    probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        return probe.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        probe.detach()


def find_capacity(owner: str = "the agent endpoint") -> int:
    """Return the number of connections that file descriptors allow, after raising the soft limit as far as possible.

    Half of the free descriptors stay free, because clients in this process need one per connection, too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a further limit, which it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    num_open = len(os.listdir("/dev/fd"))
    free = MAX_CONNECTIONS * 2 if soft == resource.RLIM_INFINITY else soft - num_open
    if free // 2 < MIN_CONNECTIONS:
        needs = f"{owner} needs at least {2 * MIN_CONNECTIONS} free file descriptors; this process may open {soft}"
        remedy = "raise the hard limit before the start, such as with `ulimit -n 4096`"
        raise ConfigError(f"{needs}, and {num_open} are open: {remedy}")
    return min(MAX_CONNECTIONS, free // 2)
