"""Adapters that an inference engine serves for samplers: brought from disk when they are asked for, the newest stay."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rlite.engine.inference import RliteInferenceEngine
from rlite.runtime.replicas.adapters import AdapterWeights
from rlite.services.tinker.weights import read_facts

WRITER = "rlite tinker"


def served_name(model_id: str, name: str, seq_id: int | None = None) -> str:
    """Return the name under which the inference engine serves saved weights.

    Args:
        model_id: their model.
        name: their name.
        seq_id: the request that saved them, as a name may be used again; None if the weights change under the name.
    """
    return f"{model_id}/{name}" if seq_id is None else f"{model_id}/{name}/{seq_id}"


@dataclass
class Served:
    """An adapter in the engine."""

    versions: dict[int, int] = field(default_factory=dict)
    """versions of its model, by those of the engine, which begin anew when the engine does"""
    num_in_flight: int = 0

    @property
    def newest(self) -> int:
        """The model's version in the engine."""
        return max(self.versions.values(), default=-1)


class ServedAdapters:
    """The adapters that an engine holds at a time.

    Args:
        engine: the inference engine.
        capacity: how many it holds; the one that was not used for the longest time gives way.
    """

    def __init__(self, engine: RliteInferenceEngine, capacity: int) -> None:
        self._engine, self._capacity = engine, capacity
        self._held: OrderedDict[str, Served] = OrderedDict()
        """by name; the adapter used last is at the end"""
        self._turn = threading.Lock()
        self._loading = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def using(self, name: str, folder: Path) -> AsyncIterator[Served]:
        """Serve an adapter inside the block.

        Args:
            name: the adapter's name.
            folder: its files, which are read if the engine does not hold it.

        Yields:
            The adapter.

        Raises:
            RliteError: the adapter cannot be served.
        """
        async with self._loading:
            if name not in self._held:
                while len(self._held) >= self._capacity and all(own.num_in_flight for own in self._held.values()):
                    self._freed.clear()
                    await self._freed.wait()
                await asyncio.to_thread(self._load, name, folder)
            served = self._held[name]
            served.num_in_flight += 1
            self._held.move_to_end(name)
        try:
            yield served
        finally:
            served.num_in_flight -= 1
            self._freed.set()

    def renew(self, name: str, folder: Path) -> None:
        """Serve the next version of an adapter, if the engine holds it; requests under way go on with it.

        Args:
            name: the adapter's name.
            folder: its new files.
        """
        with self._turn:
            if name in self._held:
                self._take(name, folder, self._held[name])

    def _load(self, name: str, folder: Path) -> None:
        with self._turn:
            resting = [own for own, served in self._held.items() if not served.num_in_flight]
            for own in resting[: max(0, len(self._held) + 1 - self._capacity)]:
                self._engine.remove_adapter(own)
                del self._held[own]
            served = Served()
            self._take(name, folder, served)
            self._held[name] = served

    def _take(self, name: str, folder: Path, served: Served) -> None:
        version = (read_facts(folder) or {}).get("version", 0)
        if version > served.newest:
            taken = self._engine.take_adapter(name, AdapterWeights.read(folder), WRITER, may_be_zero=True)
            if not served.num_in_flight:
                served.versions.clear()
            served.versions[taken] = version
