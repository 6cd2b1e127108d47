"""Weight sync between two processes on one GPU, by CUDA IPC handles: the transport's own functions at both ends.

The launcher of such processes is Ray's, which is not part of the rehearsal.
"""

from __future__ import annotations

import multiprocessing
import os
from types import SimpleNamespace
from typing import Any

import torch

from rlite.runtime.parallel.processes import process_identity
from rlite.runtime.parallel.shards import ParameterShard
from rlite.runtime.replicas import transport
from rlite.runtime.replicas.transport import Piece
from tools.mock_gpu import mock

SIZES = {f"layers.{i}.weight": 128 + i for i in range(28)}


def shards_of(dtype: torch.dtype) -> dict[str, ParameterShard]:
    """Return a worker's tensors on the device."""
    made = {name: torch.zeros(rows, 64, dtype=dtype, device="cuda") for name, rows in SIZES.items()}
    return {name: ParameterShard(tensor, (0, 0), tuple(tensor.shape)) for name, tensor in made.items()}


def read(handles: dict[str, Any], results: Any) -> None:
    """Copy all tensors of the other process into this one's."""
    shards = shards_of(torch.bfloat16)
    boxes = {name: tuple(slice(0, size) for size in shard.global_shape) for name, shard in shards.items()}
    pieces = [Piece(name, name, 0, box, box, torch.bfloat16) for name, box in boxes.items()]
    with mock.counting() as usage:
        written = transport.read(SimpleNamespace(parameter_shards=lambda: shards), pieces, [handles])
    results.put((written, usage["waits"], usage["launches"]))


def measure() -> dict[str, float]:
    """Return figures of the reading end, and what the source holds when the handles are dropped."""
    os.environ["MOCK_GPU_SHARED"] = "1"  # device memory that another process can map
    shards = shards_of(torch.float32)
    source: Any = SimpleNamespace(
        served_shards=lambda has_values=True: shards,
        arena=None,
        staged=None,
        full_tensor=lambda name: shards[name].tensor,
    )
    before = torch.cuda.memory_allocated()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    handles = transport.share(source, {f"not {process_identity()}"})
    reader = context.Process(target=read, args=(handles, results))
    reader.start()
    written, waits, launches = results.get(timeout=1800)
    reader.join(60)
    transport.unshare(source)
    expected = sum(2 * shard.tensor.numel() for shard in shards.values())
    assert written == expected, (written, expected)
    return {
        "waits of the reader": waits,
        "launches of the reader": launches,
        "KiB held by the source afterwards": (torch.cuda.memory_allocated() - before) / 1024,
        "exit status of the reader": float(reader.exitcode or 0),
    }
