"""Calls over HTTP to servers that generate: single calls, and the connections of an event loop."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlite.data.routing import RoutingTable
from rlite.errors import WorkerError
from rlite.imports import optional

with optional("servers over HTTP need", "remote"):
    import aiohttp

CALL_S = 60.0
"""default time limit of a call"""
ANSWER_S = 6.0
"""seconds in which the server must answer a look; then it counts as lost"""
LINE_BYTES = 2**27
"""half of the longest event of a stream"""
LOST = (aiohttp.ClientError, OSError, ValueError)
"""errors of a connection to a server that is lost"""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key would be sent along."""

    def redirect_request(self, *request: Any) -> None:
        """Return no further request."""


OPENER = urllib.request.build_opener(_NoRedirect)


@dataclass(frozen=True)
class Endpoint:
    """Address of a server."""

    url: str
    api_key: str | None = field(repr=False)
    kind: str = "SGLang server"
    """name in messages"""
    max_model_len: int = 0
    """longest sequence that the server accepts, in tokens"""
    vocab_size: int = 0
    routing: RoutingTable | None = None
    """form of the tables of chosen experts, if the server returns them"""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def refused(self, path: str, status: int, answer: str, retry_after: str = "") -> CallRefused:
        """Return the error for a call that the server answered with an error.

        `retry_after`: its header of this name, in seconds. A date counts as 0.
        """
        error = CallRefused(f"the {self.kind} at {self.url}", path, status, answer)
        error.retry_after_s = float(retry_after) if retry_after.isdecimal() else 0.0
        return error

    def own_ip(self) -> str:
        """Return the address at which the server reaches this node."""
        place = urllib.parse.urlsplit(self.url)
        with socket.create_connection((place.hostname or "", place.port or 80), timeout=CALL_S) as connection:
            return connection.getsockname()[0]

    def call(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = CALL_S) -> Any:
        """Send a request: POST with a JSON body, or GET without a body.

        `body`: JSON object to post. `timeout`: seconds. Returns the JSON value of the response, or its text if it is
        not JSON.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {**self.headers, "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with OPENER.open(request, timeout=timeout) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            raise self.refused(path, error.code, error.read().decode(errors="replace")) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise WorkerError(f"the {self.kind} at {self.url} did not answer {path}: {reason!r}") from error
        with contextlib.suppress(ValueError):
            return json.loads(text)
        return text


class CallRefused(WorkerError):
    """The server answered a call with an error."""

    retry_after_s: float = 0.0
    """seconds until the server wants to be asked again"""

    def __init__(self, server: str, path: str, status: int, answer: str) -> None:
        super().__init__(server, path, status, answer)
        self.status, self.message = status, answer[:1000]
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            content = json.loads(answer)
            content = content.get("error", content)
            self.message = str(content["message"] if isinstance(content, dict) else content)

    def __str__(self) -> str:
        return f"{self.args[0]} refused {self.args[1]} (HTTP {self.status}): {self.message}"


class ServerClient:
    """The connections of an event loop to one server. Errors that are no `CallRefused` say that the server is lost."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.session = aiohttp.ClientSession(
            headers=endpoint.headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S),  # the replica ends what waits too long
            read_bufsize=LINE_BYTES,
        )

    @contextlib.asynccontextmanager
    async def post(self, path: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response to a request."""
        async with self.session.post(self._endpoint.url + path, json=body, allow_redirects=False) as response:
            if response.status != 200:
                retry_after = response.headers.get("Retry-After", "")
                raise self._endpoint.refused(path, response.status, await response.text(), retry_after)
            yield response

    async def look(self, path: str) -> int:
        """Return the status of the server's answer. Any answer will do: a paused server is not ready."""
        limit = aiohttp.ClientTimeout(total=ANSWER_S)
        async with self.session.get(self._endpoint.url + path, timeout=limit, allow_redirects=False) as response:
            return response.status
