"""Who may ask a server, and how much: the token, the names of this machine, and limits of requests.

request ──Host, Origin──> 403    a page in a browser that rebound its name to this address, or any other page
──token──> 401
──place──> 429           all places are taken, and so are those to wait
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import os
import secrets
import socket
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlite.errors import ConfigError
from rlite.runtime.storage.secrets import find_secret, read_secret
from rlite.services.endpoint.requests import ApiError

TOKEN_VARIABLE = "RLITE_SERVE_TOKEN"
ADMIN_VARIABLE = "RLITE_ADMIN_TOKEN"
MIN_TOKEN = 16
"""characters of a token: shorter ones can be guessed"""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Limits:
    """Requests of a server at a time."""

    running: int = 8192
    """requests that are answered at the same time"""
    waiting: int = 0
    """requests that may wait for a place; the server answers further ones with status 429"""


class Gate:
    """Places of requests."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._num_inside = limits, 0
        self._places = asyncio.Semaphore(limits.running)

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place inside the block; wait for it if that is allowed."""
        if self._num_inside >= self._limits.running + self._limits.waiting:
            raise ApiError(
                f"{self._num_inside} requests run and wait; try again later", 429, code="rate_limit_exceeded"
            )
        self._num_inside += 1
        try:
            async with self._places:
                yield
        finally:
            self._num_inside -= 1


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Names:
    """Names under which clients reach a server; see `check`."""

    host: str
    """address on which the server listens"""
    further: Collection[str] = ()
    """names of this machine elsewhere, such as that of a proxy"""

    def check(self, headers: Mapping[str, str]) -> None:
        """Check the headers with which browsers tell whose page asks, and which name it has asked.

        Beyond loopback, any literal address is a name of this machine: a page can rebind only names.
        """
        asked = headers.get("Host", "")
        if not self._is_own(_without_port(asked)):
            raise ApiError("this server is not known under the name in the Host header", 403, code="unknown_host")
        if headers.get("Origin", f"http://{asked}") != f"http://{asked}":
            raise ApiError("this server answers no pages of other origins", 403, code="foreign_origin")

    def _is_own(self, name: str) -> bool:
        if name in LOCAL_NAMES or name in self.further:
            return True
        if is_loopback(self.host):
            return False
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(name))
        return name in {self.host, socket.gethostname(), socket.getfqdn()}


def _without_port(host: str) -> str:
    """Return the name in a Host header in small letters, and an IPv6 address without its brackets."""
    name, _, port = host.lower().rpartition(":")
    name = name if name and port.isdigit() and not (":" in name and not name.endswith("]")) else host.lower()
    return name.removeprefix("[").removesuffix("]")


def digest(token: str) -> bytes:
    """Return what tokens are looked up and compared by, so that the time it takes tells nothing of them."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def token_of(headers: Mapping[str, str]) -> str:
    """Return the token of a request, as OpenAI's clients and as Anthropic's send it; "" if there is none."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else headers.get("X-Api-Key", "")


def find_token(file: Path, environment: Mapping[str, str]) -> str:
    """Return the token of a server: that of the environment, else that of a file, which is made if there is none."""
    if (token := environment.get(TOKEN_VARIABLE)) is not None:
        return _checked(token.strip(), TOKEN_VARIABLE)
    with contextlib.suppress(FileExistsError):
        make_token(file)
    return _checked(read_secret(file, "token_file"), f"token_file={file}")


def find_admin_token(file: str | None, environment: Mapping[str, str], token: str) -> str | None:
    """Return the administrator's token, of the environment or else of a file; None if there is neither."""
    found = find_secret(ADMIN_VARIABLE, file, "admin_token_file", environment)
    where = ADMIN_VARIABLE if ADMIN_VARIABLE in environment else f"admin_token_file={file}"
    if found is not None and _checked(found, where) == token:
        raise ConfigError(f"{where}: the same token as that of all other requests; expected another")
    return found


def make_token(file: Path, prefix: str = "") -> None:
    """Write a new token to a file that only its owner may read."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise
    except OSError as error:
        raise ConfigError(f"token_file={file}: cannot be made: {error}") from error
    with open(descriptor, "w", encoding="utf-8") as opened:
        opened.write(prefix + secrets.token_urlsafe(32) + "\n")


def _checked(token: str, where: str) -> str:
    """Return a token that is long enough and can stand in a header."""
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{where}: expected a token of {MIN_TOKEN} or more letters, digits and signs, without white space, such as "
            "`openssl rand -hex 32` writes"
        )
    return token
