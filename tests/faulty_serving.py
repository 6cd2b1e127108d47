"""Executors that serve something else than weight sync has written, each in its own way."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rlite.backends.embedded import worker as embedded
from rlite.engine.registry import register_executor
from rlite.runtime.cluster.host import WorkerContext

TENSOR = "model.layers.1.mlp.down_proj.weight"
FAULTS = {
    "flipped": f"{TENSOR} on inference-.* is not what train-.* sent, as it is served",
    "unwritten": f"{TENSOR} on inference-.* is not what train-.* sent, as it is served",
    "stale": r"version 0 in place of 1 on inference-.*",
}
"""executors by name, and what a verified weight sync says about them"""


class FaultyWorker(embedded.EmbeddedWorker):
    """The last replica of an engine has the fault."""

    fault = ""

    def weights_changed(self, version: int) -> None:
        tensor = self.parameter_shards()[TENSOR].tensor
        if self.fault == "flipped":
            tensor.view(torch.int32).flatten()[-1] ^= 1
        if self.fault == "unwritten":
            tensor.copy_(self.first)
        super().weights_changed(version - (self.fault == "stale"))


def make_worker(context: WorkerContext, path: str, options: Any, executor_size: int, fault: str) -> FaultyWorker:
    made = embedded.make_worker(context, path, options, executor_size)
    made.__class__ = FaultyWorker
    if context.rank == context.world_size - 1:
        made.fault, made.first = fault, made.parameter_shards()[TENSOR].tensor.clone()
    return made


for name in FAULTS:
    register_executor("inference", name, replace(embedded.BACKEND, worker=partial(make_worker, fault=name)))
