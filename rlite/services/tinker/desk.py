"""The order of work: requests of one model in the order of their numbers, and models in turns.

accept: checked, journaled, synced ──> pending (waits for the numbers before it) ──> work ──> result
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlite.errors import DataError
from rlite.services.tinker.journal import REQUEST, Record
from rlite.services.tinker.tenants import Request, Result, TenantModel, Tenants
from rlite.services.tinker.trainer import Trainer

logger = logging.getLogger(__name__)
MAX_AHEAD = 4096
"""largest distance of a request's number from the work"""


def _digest(request: Request) -> bytes:
    return hashlib.sha256(request.encoded).digest()


class QueueFull(Exception):
    """The client has to try again later."""


class Desk:
    """Accepts requests for models and lets the trainer work on them.

    Args:
        trainer: works on requests.
        tenants: all sessions.
        max_journal_bytes: limit of a model's journal.
        idle_seconds: after so long without a request a model leaves the engine's memory.
    """

    def __init__(self, trainer: Trainer, tenants: Tenants, max_journal_bytes: int, idle_seconds: float) -> None:
        self._trainer, self._tenants = trainer, tenants
        self._max_journal_bytes, self._idle_seconds = max_journal_bytes, idle_seconds
        self._thread = ThreadPoolExecutor(1, "tinker trainer")
        self._disk = ThreadPoolExecutor(4, "tinker journal")
        self._wake = asyncio.Event()
        self._settled = asyncio.Condition()
        self._turns: list[TenantModel] = []
        """models whose next request is there, in the order of their turns"""

    def recover(self) -> None:
        """Queue what an earlier server has accepted and not worked on."""
        for model in self._tenants.models():
            if not model.is_gone:
                self._trainer.recover(model)
                model.seen = {seq_id: _digest(request) for seq_id, request in model.pending.items() if seq_id}
                self._queue(model)

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            while self._turns:
                model = self._turns.pop(0)
                await self._in_thread(self._trainer.work, model)
                self._queue(model)
                async with self._settled:
                    self._settled.notify_all()
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), min(5.0, self._idle_seconds))
            except TimeoutError:
                await self._offload_idle()

    async def close(self) -> None:
        """Wait for the request under way."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        self._disk.shutdown()

    @property
    def queues(self) -> dict[str, int]:
        """Requests that wait, by model."""
        return {model.model_id: len(model.pending) for model in self._tenants.models() if model.pending}

    # -- accepting -----------------------------------------------------------------------------------------------

    def create(self, model: TenantModel, answer: dict[str, Any]) -> None:
        """Queue the making of a new model, which is on disk already."""
        model.pending[0] = Request("create", Result.of(answer).body)
        self._queue(model)

    async def accept(self, model: TenantModel, seq_id: int, request: Request) -> str:
        """Keep a request on disk and queue it. A retry of an accepted request changes nothing.

        Args:
            model: the model.
            seq_id: number of the request.
            request: the request, which was checked.

        Returns:
            The id by which its result is asked for.

        Raises:
            DataError: the number was given to another request, or the request cannot be accepted at all.
            QueueFull: it may be accepted later.
            StorageError: it could not be written.
        """
        async with model.turn:
            if seq_id not in model.seen and seq_id >= model.next_seq:
                self._check_room(model, seq_id, request)
                record = Record(REQUEST, seq_id, request.encoded)
                await asyncio.get_running_loop().run_in_executor(self._disk, model.journal.append, record)
                model.seen[seq_id] = _digest(request)
                model.pending[seq_id] = request
                model.used_at = time.monotonic()
                self._queue(model)
            elif model.seen.get(seq_id, _digest(request)) != _digest(request):
                told = f"request {seq_id} of {model.model_id} was already given with another content"
                raise DataError(f"{told}: one model has two writers; give each its own model")
        return f"{model.model_id}:{seq_id}"

    def _check_room(self, model: TenantModel, seq_id: int, request: Request) -> None:
        if model.is_gone:
            raise DataError(f"model {model.model_id!r} was unloaded; load its saved weights into a new one")
        if seq_id < 1 or seq_id > model.next_seq + MAX_AHEAD:
            raise DataError(f"seq_id={seq_id}: expected a number from 1 on, at most {MAX_AHEAD} ahead")
        if model.journal.num_bytes + len(request.encoded) > self._max_journal_bytes:
            if model.pending and model.is_ready:
                raise QueueFull(f"{model.model_id} has more waiting requests than its journal holds")
            told = f"its requests since the last optim_step take more than {self._max_journal_bytes >> 20} MiB"
            raise DataError(f"{model.model_id}: {told} (max_journal_mib); call optim_step or save_state")

    async def result(self, model: TenantModel, seq_id: int, seconds: float) -> Result | None:
        """Return the result of a request, or None if it is not there in time.

        Args:
            model: the model.
            seq_id: number of the request.
            seconds: how long to wait.

        Raises:
            DataError: there is no such request, or its result is no longer kept.
        """
        async with self._settled:
            try:
                await asyncio.wait_for(self._settled.wait_for(lambda: seq_id in model.results), seconds)
            except TimeoutError:
                if seq_id < model.next_seq and seq_id not in model.results:
                    told = "was worked on, and its result is no longer kept"
                    raise DataError(f"request {seq_id} of {model.model_id} {told}") from None
        return model.results.get(seq_id)

    # -- work ----------------------------------------------------------------------------------------------------

    def _queue(self, model: TenantModel) -> None:
        if model.is_ready and model not in self._turns:
            self._turns.append(model)
            self._wake.set()

    async def unload(self, model: TenantModel) -> None:
        """Free a model for good, after the request under way."""
        model.is_gone = True
        await self._in_thread(self._trainer.drop, model)

    async def offload(self, model: TenantModel) -> None:
        """Free a model's memory, after the request under way."""
        await self._in_thread(self._trainer.offload, model)

    async def _offload_idle(self) -> None:
        for model in self._tenants.models():
            is_idle = not model.pending and time.monotonic() - model.used_at > self._idle_seconds
            if model.is_resident and is_idle:
                logger.info("%s has left the engine after %g s without a request", model.model_id, self._idle_seconds)
                await self.offload(model)

    async def _in_thread(self, act: Any, model: TenantModel) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, act, model)
