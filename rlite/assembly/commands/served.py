"""Servers of commands: their end by a signal, and what is said of their address."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rlite.errors import ConfigError
from rlite.services.endpoint.guard import is_loopback


@asynccontextmanager
async def until_interrupted(host: str, port: int) -> AsyncIterator[asyncio.Event]:
    """Yield an event that SIGINT and SIGTERM set. For the main thread.

    Args:
        host: address on which the block listens, for messages.
        port: its port.

    Raises:
        ConfigError: the address cannot be used.
    """
    is_over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, is_over.set)
    try:
        yield is_over
    except OSError as error:
        raise ConfigError(f"host={host} port={port}: cannot be used: {error.strerror or error}") from error


def tell_reach(host: str, what: str) -> None:
    """Print who can connect to an address, and how the server ends.

    Args:
        host: the address.
        what: what travels beside the token.
    """
    if not is_loopback(host):
        print(
            f"other machines can connect to {host}, and nothing is encrypted: {what} and the token can be read on the "
            "way. Use a trusted network, or a proxy with TLS in front"
        )
    print("Ctrl-C ends it", flush=True)
