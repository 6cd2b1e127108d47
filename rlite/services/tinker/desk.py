"""The order of work: requests of one model in the order of their numbers, and models in turns.

accept: checked, journaled, synced ──> pending (waits for the numbers before it) ──> work ──> result
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from rlite.errors import CheckpointError, DataError, StorageError
from rlite.services.endpoint.requests import ApiError
from rlite.services.tinker.journal import REQUEST, Record
from rlite.services.tinker.options import TinkerLimits
from rlite.services.tinker.tenants import Request, Result, TenantModel, Tenants
from rlite.services.tinker.trainer import Trainer
from rlite.services.tinker.weights import drop_expired

logger = logging.getLogger(__name__)
MAX_AHEAD = 4096
"""largest distance of a request's number from the work"""
TIDY_SECONDS = 2.0
T = TypeVar("T")


class Desk:
    """Accepts requests for models and lets the trainer work on them.

    Args:
        trainer: works on requests.
        tenants: all sessions.
        limits: limits of tenants.
    """

    def __init__(self, trainer: Trainer, tenants: Tenants, limits: TinkerLimits) -> None:
        self._trainer, self._tenants, self._limits = trainer, tenants, limits
        self._idle_seconds = limits.idle_minutes * 60
        self._thread = ThreadPoolExecutor(1, "tinker trainer")
        self._disk = ThreadPoolExecutor(4, "tinker journal")
        self._wake = asyncio.Event()
        self._settled = asyncio.Condition()
        self._turns: list[TenantModel] = []
        """models whose next request is there, in the order of their turns"""
        self._tidying: Iterator[TenantModel] = iter(())

    def recover(self) -> None:
        """Queue what an earlier server has accepted and not worked on."""
        for model in self._tenants.models():
            if not model.is_gone:
                self._trainer.recover(model)
                self._queue(model)

    async def run(self) -> None:
        """Work until cancelled."""
        tidy_at = 0.0
        while True:
            if self._turns:
                model = self._turns.pop(0)
                if model.is_ready:  # a later request may have queued it while the one before was worked on
                    await self.do(partial(self._trainer.work, model))
                self._queue(model)
                async with self._settled:
                    self._settled.notify_all()
            else:
                self._wake.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), min(TIDY_SECONDS, self._idle_seconds))
            if time.monotonic() >= tidy_at:
                try:
                    await self.do(self._tidy)
                except (CheckpointError, StorageError) as error:  # tried again: the model stays in memory until then
                    logger.warning("an idle model could not be saved: %s", error)
                tidy_at = time.monotonic() + min(TIDY_SECONDS, self._idle_seconds)

    async def close(self) -> None:
        """Wait for the request under way."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        self._disk.shutdown()

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
            ApiError: it may be accepted later.
            StorageError: it could not be written.
        """
        async with model.turn:
            known = model.digest(seq_id)
            if known is None and seq_id >= model.next_seq:
                self._check_room(model, seq_id, request)
                record = Record(REQUEST, seq_id, request.encoded)
                await asyncio.get_running_loop().run_in_executor(self._disk, model.journal.append, record)
                model.pending[seq_id] = request
                model.used_at = time.monotonic()
                self._queue(model)
            elif known not in (None, request.digest):
                told = f"request {seq_id} of {model.model_id} was already given with another content"
                raise DataError(f"{told}: one model has two writers; give each its own model")
        return f"{model.model_id}:{seq_id}"

    def _check_room(self, model: TenantModel, seq_id: int, request: Request) -> None:
        if model.is_gone:
            raise DataError(f"model {model.model_id!r} was unloaded; load its saved weights into a new one")
        if seq_id < 1 or seq_id > model.next_seq + MAX_AHEAD:
            raise DataError(f"seq_id={seq_id}: expected a number from 1 on, at most {MAX_AHEAD} ahead")
        most = self._limits.max_journal_mib * (1 if request.kind == "forward_backward" else 2)  # a step must fit
        if model.journal.num_bytes + len(request.encoded) > most << 20:
            if model.pending and model.is_ready:
                raise ApiError(f"{model.model_id} has more waiting requests than its journal holds", 429)
            told = f"its requests since the last optim_step take more than {most} MiB"
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
        await self.do(partial(self._trainer.drop, model))

    async def offload(self, model: TenantModel) -> None:
        """Free a model's memory, after the request under way."""
        await self.do(partial(self._trainer.offload, model))

    async def do(self, act: Callable[[], T]) -> T:
        """Return the result of a change of models or saved weights, all of which one thread makes.

        Args:
            act: the change.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, act)

    def _tidy(self) -> None:
        """Free the memory of idle models, and delete expired weights of one model."""
        for model in self._tenants.models():
            is_idle = not model.pending and time.monotonic() - model.used_at > self._idle_seconds
            if model.is_resident and is_idle:
                self._trainer.offload(model)
                logger.info("%s has left the engine after %g s without a request", model.model_id, self._idle_seconds)
        if (following := next(self._tidying, None)) is None:
            self._tidying = self._tenants.models()
        else:
            drop_expired(following.folder)
