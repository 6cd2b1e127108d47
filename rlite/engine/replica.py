"""The seam between the inference engine and its executors: replicas, their workers, and the registered backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlite.engine.registry import Backend
from rlite.engine.workers import Worker
from rlite.types import SequenceRequest, TokenChunk


class ServingWorker(Worker, Protocol):
    """One process of a replica."""

    def load_weights(self, path: str | None) -> None:
        """Read weights from a checkpoint of the same model; None is the engine's own."""
        ...

    def set_version(self, version: int) -> None:
        """Stamp tokens with this policy version from now on."""
        ...


class PumpedWorker(ServingWorker, Protocol):
    """A synchronous worker that the driver pumps."""

    def advance(self, new: Sequence[SequenceRequest], cancelled: Sequence[int], max_steps: int) -> list[TokenChunk]:
        """Take in new requests, end cancelled ones, and make up to `max_steps` tokens of each running request."""
        ...


@dataclass(frozen=True, kw_only=True)
class InferenceBackend(Backend):
    """An inference executor, as `register_executor("inference", NAME, ...)` takes it."""

    check: Callable[[str, int], None] | None = None
    """check(path, tensor_parallel_size) in the driver, before any process starts; raises ConfigError for a checkpoint
    that the executor cannot serve"""
