"""A server of `rlite view` in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlite.viewer.run import open_runs
from rlite.viewer.server import PageServer


@contextmanager
def serving(folders: Sequence[str]) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    server = PageServer(open_runs(list(folders)))
    loop = asyncio.new_event_loop()
    is_ready, is_over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with server:
            is_ready.set()
            await is_over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert is_ready.wait(30), "the server did not start"
        yield server.url
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(30)
        loop.close()
