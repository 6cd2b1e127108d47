"""Decode steps recorded as CUDA graphs: a step of a small model costs its kernels, not the launching of them.

A graph replays the same kernels on the same addresses. So a step is captured for a number of rows and a width of
cache, both rounded up to a bucket; its inputs are copied into buffers that stay where they are; and captures are
forgotten when weights or cache have moved. New weights that are written in place need no new capture. Sampling stays
outside.

A step is captured when its buckets first occur, which takes a few steps' time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from rlite.engine.embedded.attention import FixedDecodePlan
from rlite.engine.embedded.cache import SlotCache
from rlite.engine.embedded.model import ShardedModel

NARROWEST = 256
"""positions of the cache that the narrowest capture reads"""
WARM_UPS = 2
"""eager steps before a capture: libraries allocate their workspaces in the first ones"""

C = TypeVar("C")
Addresses = tuple[int, ...]


def bucket(num: int, limit: int, smallest: int = 1) -> int:
    """The power of two from `smallest` on that holds `num`, but no more than `limit`, which must hold it too."""
    size = smallest
    while size < num:
        size *= 2
    return min(size, limit)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a captured step was captured for."""

    rows: int
    """the first slots; those beyond the batch are free, and what is computed for them is thrown away"""
    width: int
    """leading positions of the cache that are read"""

    @classmethod
    def of(cls, num_rows: int, longest: int, num_slots: int, max_len: int) -> Shape:
        """For a batch of `num_rows` sequences, the longest of which has `longest` tokens, the new one included."""
        return cls(bucket(num_rows, num_slots), bucket(longest, max_len, NARROWEST))


class Captures(Generic[C]):
    """Captures by shape, which hold as long as the memory that they were made with stays where it is."""

    def __init__(self) -> None:
        self._addresses: Addresses = ()
        self._made: dict[Shape, C] = {}

    def __len__(self) -> int:
        return len(self._made)

    def get(self, addresses: Addresses, shape: Shape, capture: Callable[[Shape], C]) -> C:
        """The capture of this shape, made by `capture` if there is none for memory at `addresses`."""
        if addresses != self._addresses:
            self._made.clear()
            self._addresses = addresses
        if shape not in self._made:
            self._made[shape] = capture(shape)
        return self._made[shape]

    def clear(self) -> None:
        """Forget all, and give back what they hold."""
        self._made.clear()


def is_capturable(config: Any) -> bool:
    """Whether a model's step is the same kernels each time: some rotary embeddings look at the longest position."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type", "default") not in ("dynamic", "longrope")


def logits_of_fixed_step(
    model: ShardedModel, cache: SlotCache, tokens: torch.Tensor, positions: torch.Tensor, width: int
) -> torch.Tensor:
    """What is captured: a token of each of the first slots, at its position, to logits `[rows, vocabulary]`."""
    return model.logits(tokens, positions, FixedDecodePlan(cache, positions, width))


class DecodeGraphs:
    """The captured steps of one model and the buffers that they read. One device, no tensor parallelism."""

    def __init__(self, model: ShardedModel, num_slots: int) -> None:
        self._model = model
        self._num_slots = num_slots
        self._tokens = torch.zeros(num_slots, dtype=torch.int64, device=model.device)
        self._positions = torch.zeros(num_slots, dtype=torch.int64, device=model.device)
        self.captures: Captures[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = Captures()
        self._pool: Any = None
        """memory for what is between inputs and logits; captures never run at the same time and share it"""

    def addresses(self, cache: SlotCache) -> Addresses:
        """Where everything lies that a capture reads and writes, but for its own buffers."""
        return (*self._model.addresses(), cache.keys.data_ptr(), cache.values.data_ptr())

    def logits(
        self, cache: SlotCache, addresses: Addresses, tokens: torch.Tensor, positions: torch.Tensor, longest: int
    ) -> torch.Tensor:
        """As `ShardedModel.logits`, for the first slots; good until the next call.

        `longest` is the longest sequence's length, the new token included, known without asking the device.
        """
        num_rows = len(tokens)
        shape = Shape.of(num_rows, longest, self._num_slots, cache.max_len)
        self._tokens[:num_rows].copy_(tokens)
        self._positions[:num_rows].copy_(positions)
        self._positions[num_rows : shape.rows].zero_()
        graph, logits = self.captures.get(addresses, shape, lambda shape: self._capture(cache, shape))
        graph.replay()
        return logits[:num_rows]

    def clear(self) -> None:
        """Give back the memory of all captures; they are made anew when needed."""
        self.captures.clear()
        self._pool = None

    def _capture(self, cache: SlotCache, shape: Shape) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        tokens, positions = self._tokens[: shape.rows], self._positions[: shape.rows]

        def step() -> torch.Tensor:
            return logits_of_fixed_step(self._model, cache, tokens, positions, shape.width)

        with torch.cuda.device(self._model.device):
            # the inputs are real: a warm-up writes the keys and values that the replay after it writes again
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(WARM_UPS):
                    step()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool):
                logits = step()
        return graph, logits
