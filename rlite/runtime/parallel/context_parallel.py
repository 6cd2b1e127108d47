"""Context parallelism: the ranks of a group share the tokens of one pack (Llama 3, Dubey et al. 2024, section 3.3.2).

Each rank runs the model on two chunks of the pack, an early and a late one, so that causal attention costs all ranks
about the same. Keys and values are gathered from all ranks; a query attends inside its own sequence.

    8 chunks on 4 ranks    0 1 2 3 4 5 6 7
                      rank 0 1 2 3 3 2 1 0
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from rlite.runtime.parallel.collectives import gather, pad_to_multiple


@dataclass(frozen=True)
class Segment:
    """Queries of one chunk that belong to one sequence, and the keys that they may attend to."""

    queries: slice
    """among this rank's tokens"""
    keys: slice
    """in the whole pack; the last key is that of the last query"""


class ContextShare:
    """One rank's tokens of a pack. Padding gives all ranks equally many.

    Args:
        cu_seqlens: [N + 1], boundaries of the sequences in the pack.
        group: the ranks that share the pack; None keeps the whole pack on this rank.
    """

    def __init__(self, cu_seqlens: Tensor, group: dist.ProcessGroup | None) -> None:
        self.group = group
        if group is None:
            return
        bounds = cu_seqlens.tolist()
        self.num_tokens = bounds[-1]
        size = group.size()
        self.chunk = -(-self.num_tokens // (2 * size))
        order = [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]
        starts = torch.tensor(order)[:, None] * self.chunk
        self._order = (starts + torch.arange(self.chunk)).flatten().to(cu_seqlens.device)
        """the position in the pack of each token, rank after rank"""
        self._position = self._order.argsort()
        self.segments = self._find_segments(bounds, order[2 * group.rank() : 2 * group.rank() + 2], 2 * size)

    def _find_segments(self, bounds: list[int], chunks: list[int], num_chunks: int) -> list[Segment]:
        total = self.chunk * num_chunks
        bounds = [*bounds, total] if total > self.num_tokens else bounds  # what fills up is a sequence of its own
        segments = []
        for index, chunk in enumerate(chunks):
            begin, end = chunk * self.chunk, (chunk + 1) * self.chunk
            to_local = index * self.chunk - begin
            for start, stop in pairwise(bounds):
                first, last = max(start, begin), min(stop, end)
                if first < last:
                    segments.append(Segment(slice(first + to_local, last + to_local), slice(start, last)))
        return segments

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of `x` [T, ...]; padding is zero."""
        if self.group is None:
            return x
        return pad_to_multiple(x, 2 * self.group.size() * self.chunk, dim=0)[self._own_order(self.group)]

    def own_positions(self) -> Tensor:
        """Return the position in the pack of each of this rank's tokens; -1 is padding. Needs a group."""
        assert self.group is not None
        own = self._own_order(self.group)
        return torch.where(own < self.num_tokens, own, -1)

    def _own_order(self, group: dist.ProcessGroup) -> Tensor:
        return self._order.chunk(group.size())[group.rank()]

    def gather_keys(self, x: Tensor) -> Tensor:
        """Return all tokens in the order of the pack, from this rank's [t, ...]. The ranks' gradients are added up."""
        if self.group is None:
            return x
        return gather(x, self.group, dim=0, grad="sum")[self._position]

    def gather_results(self, x: Tensor) -> Tensor:
        """Return all tokens [T, ...] in the order of the pack, for computations that every rank repeats."""
        if self.group is None:
            return x
        return gather(x, self.group, dim=0, grad="slice")[self._position][: self.num_tokens]
