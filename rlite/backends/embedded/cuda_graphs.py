"""Decode steps captured as CUDA graphs, so that a small model's step costs no kernel launches.

A graph replays the same kernels on the same addresses. A step is captured for a number of rows and a width of cache,
both rounded up to a bucket. Its inputs are copied into buffers at fixed addresses. Captures are discarded when weights
or cache move. Weights that are written in place need no new capture. Sampling is not captured.

A step is captured when its buckets first occur. The capture takes as long as a few steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlite.backends.embedded.attention import DecodePlan
from rlite.backends.embedded.cache import SlotCache
from rlite.backends.embedded.model import ShardedModel

NARROWEST = 256
"""positions of the cache that the narrowest capture reads"""
WARM_UPS = 2
"""eager steps before a capture, in which libraries allocate their workspaces"""

Addresses = tuple[int, ...]


def bucket(num: int, limit: int, smallest: int = 1) -> int:
    """Return the smallest power-of-two multiple of `smallest` that is at least `num`, but at most `limit`.

    Args:
        num: size to round up; at most `limit`.
        limit: largest bucket.
        smallest: smallest bucket; a power of two.
    """
    size = smallest
    while size < num:
        size *= 2
    return min(size, limit)


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a captured step."""

    rows: int
    """number of first slots; slots beyond the batch are free, and their results are discarded"""
    width: int
    """leading positions of the cache that are read"""

    @classmethod
    def of(cls, num_rows: int, longest: int, num_slots: int, max_len: int) -> Shape:
        """Return the shape for a batch.

        Args:
            num_rows: number of sequences.
            longest: tokens of the longest sequence, the new token included.
            num_slots: slots of the cache.
            max_len: positions of a slot.
        """
        return cls(bucket(num_rows, num_slots), bucket(longest, max_len, NARROWEST))


def logits_of_fixed_step(
    model: ShardedModel, cache: SlotCache, tokens: Tensor, positions: Tensor, width: int
) -> Tensor:
    """Return logits `[rows, vocabulary]` of the step that is captured: one token of each of the first slots.

    Every row is computed at the same width, so its kernels do not depend on the values of the positions.

    Args:
        model: the model.
        cache: the KV cache.
        tokens: `[rows]`.
        positions: `[rows]`.
        width: leading positions of the cache that are read.
    """
    return model.logits(tokens, positions, DecodePlan(cache, [width] * len(tokens), positions[None]))


Replay = Callable[[], object]


class Recorder(Protocol):
    """Recorder of steps."""

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        """Return a function that runs the step again, and the tensor that holds the result."""
        ...

    def clear(self) -> None:
        """Free the memory of recordings, which do not run again."""
        ...


class GraphRecorder:
    """Recorder of CUDA graphs on one device.

    All recordings use one stream and one memory pool, because they never run at the same time. Each stream costs a
    workspace of cuBLAS, which is never freed.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        """memory for intermediate results"""

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        """Record a step.

        Args:
            step: runs on the current stream. Its inputs are real: a warm-up writes the keys and values that the replay
                after it writes again.

        Returns:
            A function that replays the step, and the tensor that holds the result.
        """
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    step()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # other threads of the process may allocate meanwhile
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                result = step()
        return graph.replay, result

    def clear(self) -> None:
        """Free the memory of intermediate results and workspaces. The recordings must not run again."""
        self._pool = self._stream = None
        torch._C._cuda_clearCublasWorkspaces()


class DecodeGraphs:
    """The captured steps of one model and their input buffers, on one device without tensor parallelism.

    Args:
        model: the model.
        num_slots: slots of the cache.
        recorder: recorder of steps.
    """

    def __init__(self, model: ShardedModel, num_slots: int, recorder: Recorder) -> None:
        self._model = model
        self._num_slots = num_slots
        self._tokens = torch.zeros(num_slots, dtype=torch.int64, device=model.device)
        self._positions = torch.zeros(num_slots, dtype=torch.int64, device=model.device)
        self._recorder = recorder
        self._addresses: Addresses = ()
        self.captures: dict[Shape, tuple[Replay, Tensor]] = {}
        """captures, valid as long as the memory that they use stays at its addresses"""

    def addresses(self, cache: SlotCache) -> Addresses:
        """Return the addresses of all memory that a capture reads and writes, except its own buffers."""
        return (*self._model.addresses(), cache.keys.data_ptr(), cache.values.data_ptr())

    def logits(self, cache: SlotCache, addresses: Addresses, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Return logits `[rows, vocabulary]` of the first slots as `ShardedModel.logits` does.

        They are valid until the next call.

        Args:
            cache: the KV cache.
            addresses: result of `addresses(cache)`.
            tokens: `[rows]`.
            positions: `[rows]`.
            longest: tokens of the longest sequence, the new token included, known without a device synchronisation.
        """
        num_rows = len(tokens)
        shape = Shape.of(num_rows, longest, self._num_slots, cache.max_len)
        self._tokens[:num_rows].copy_(tokens)
        self._positions[:num_rows].copy_(positions)
        # rows of slots that may hold kept caches, none of which reaches the last position
        self._positions[num_rows : shape.rows].fill_(cache.max_len - 1)
        if addresses != self._addresses:
            self.captures.clear()
            self._addresses = addresses
        if shape not in self.captures:
            self.captures[shape] = self._capture(cache, shape)
        replay, logits = self.captures[shape]
        replay()
        return logits[:num_rows]

    def clear(self) -> None:
        """Free the memory of all captures. Steps are captured again when needed."""
        self.captures.clear()
        self._recorder.clear()

    def _capture(self, cache: SlotCache, shape: Shape) -> tuple[Replay, Tensor]:
        tokens, positions = self._tokens[: shape.rows], self._positions[: shape.rows]
        return self._recorder(lambda: logits_of_fixed_step(self._model, cache, tokens, positions, shape.width))
