"""Executors that serve something else than weight sync has written, each in its own way."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rlite.backends.embedded import worker as embedded
from rlite.backends.sglang import replica as sglang
from rlite.backends.vllm import worker as vllm
from rlite.engine.registry import register_executor
from rlite.runtime.cluster.host import WorkerContext
from rlite.runtime.parallel.shards import CheckpointReader
from rlite.runtime.replicas.digests import Served

TENSOR = "model.layers.1.self_attn.k_proj.weight"
FAULTS = {
    "flipped": f"{TENSOR} on inference-.* is not what train-.* sent, as it is served",
    "unwritten": f"{TENSOR} on inference-.* is not what train-.* sent, as it is served",
    "stale": r"version 0 in place of 1 on inference-.*",
}
"""executors by name, and what a verified weight sync says about them"""
IN_TURN = {1: "flipped", 2: "unwritten", 3: "stale"}


class Faulty:
    """Mixin of workers whose syncs to some versions have a fault. In an engine of several, the last worker has it."""

    schedule: Mapping[int, str]
    path: str

    def weights_changed(self, version: int) -> None:
        fault = self.schedule.get(version)
        held: Any = self.parameter_shards().get(TENSOR)  # type: ignore[attr-defined]
        if fault == "flipped" and held is not None:
            held.tensor.view(torch.int32).flatten()[-1] ^= 1
        if fault == "unwritten" and held is not None:
            held.tensor.copy_(CheckpointReader(self.path).read(TENSOR, held.box))
        if fault == "unsent":
            self._buckets = []
        super().weights_changed(version - (fault == "stale"))  # type: ignore[misc]

    def digest(self, pieces: Any) -> Served:
        served = super().digest(pieces)  # type: ignore[misc]
        return (
            served._replace(checksums={"norm@0": str(os.getpid())}) if "disagrees" in self.schedule.values() else served
        )


def make_worker(
    context: WorkerContext,
    path: str,
    options: Any,
    size: int,
    make: Callable[..., Any],
    schedule: Mapping[int, str],
    is_everywhere: bool = False,
) -> Any:
    """Return a worker of another executor that may have faults."""
    made = make(context, path, options, size)
    made.__class__ = type("FaultyWorker", (Faulty, type(made)), {})
    made.path = path
    made.schedule = schedule if is_everywhere or context.rank == context.world_size - 1 else {}
    return made


def register(name: str, backend: Any, schedule: Mapping[int, str], **options: Any) -> None:
    worker = partial(make_worker, make=backend.worker, schedule=schedule, **options)
    register_executor("inference", name, replace(backend, worker=worker))


for name in FAULTS:
    register(name, embedded.BACKEND, {1: name, 2: name})
register("disagrees", embedded.BACKEND, {1: "disagrees"}, is_everywhere=True)
register("vllm-faulty", vllm.BACKEND, IN_TURN, is_everywhere=True)
register("sglang-faulty", sglang.BACKEND, {2: "unsent"})
FAULTY = {*FAULTS, "disagrees", "fragile", "vllm-faulty", "sglang-faulty"}
"""names of the executors"""
