"""Adapters that an inference engine serves for samplers: brought from disk when they are asked for, the newest stay."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rlite.engine.inference import RliteInferenceEngine
from rlite.runtime.replicas.adapters import AdapterWeights

WRITER = "rlite tinker"


def served_name(model_id: str, name: str) -> str:
    """Return the name under which the inference engine serves saved weights."""
    return f"{model_id}/{name}"


class ServedAdapters:
    """The adapters that an engine holds at a time.

    Args:
        engine: the inference engine.
        capacity: how many it holds; the one that was not used for the longest time gives way.
    """

    def __init__(self, engine: RliteInferenceEngine, capacity: int) -> None:
        self._engine, self._capacity = engine, capacity
        self._in_flight: OrderedDict[str, int] = OrderedDict()
        """requests under way, by the adapter's name; the adapter used last is at the end"""
        self._turn = threading.Lock()
        self._loading = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def using(self, name: str, folder: Path) -> AsyncIterator[None]:
        """Serve an adapter inside the block.

        Args:
            name: the adapter's name.
            folder: its files, which are read if the engine does not hold it.

        Yields:
            None.

        Raises:
            RliteError: the adapter cannot be served.
        """
        async with self._loading:
            if name not in self._in_flight:
                while len(self._in_flight) >= self._capacity and all(self._in_flight.values()):
                    self._freed.clear()
                    await self._freed.wait()
                await asyncio.to_thread(self._load, name, folder)
            self._in_flight[name] += 1
            self._in_flight.move_to_end(name)
        try:
            yield
        finally:
            self._in_flight[name] -= 1
            self._freed.set()

    def renew(self, name: str, folder: Path) -> None:
        """Serve the next version of an adapter, if the engine holds it; requests under way go on with it.

        Args:
            name: the adapter's name.
            folder: its new files.
        """
        with self._turn:
            if name in self._in_flight:
                self._engine.take_adapter(name, AdapterWeights.read(folder), WRITER, may_be_zero=True)

    def _load(self, name: str, folder: Path) -> None:
        with self._turn:
            resting = [own for own, num in self._in_flight.items() if not num]
            for own in resting[: max(0, len(self._in_flight) + 1 - self._capacity)]:
                self._engine.remove_adapter(own)
                del self._in_flight[own]
            self._engine.take_adapter(name, AdapterWeights.read(folder), WRITER, may_be_zero=True)
            self._in_flight[name] = 0
