"""Tensors that are made of other tensors by joining, cutting and reordering, read box by box.

Each expression knows its shape. Reading a box of it reads only the boxes of other tensors that the box consists of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from rlite.runtime.parallel.shards import Box

Shape = tuple[int, ...]


class Source(Protocol):
    """Tensors by name, such as a `CheckpointReader`."""

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor."""


class Held(dict[str, Tensor]):
    """Tensors in memory as a source."""

    def read(self, name: str, box: Box = ()) -> Tensor:
        """Return a view of a box of a tensor."""
        return self[name][box]


class Expression(Protocol):
    """A tensor that is read from other tensors."""

    @property
    def shape(self) -> Shape:
        """Shape of the whole tensor."""

    def read(self, source: Source, box: Box) -> Tensor:
        """Return a box of the tensor, read from `source`."""

    def leaves(self) -> Iterator[str]:
        """Yield the names of the tensors of the source that the tensor consists of."""


def whole(shape: Shape) -> Box:
    """Return the box of a whole tensor."""
    return tuple(slice(0, size) for size in shape)


def _sizes(box: Box) -> Shape:
    return tuple(part.stop - part.start for part in box)


def _replaced(box: Box, dim: int, part: slice) -> Box:
    return (*box[:dim], part, *box[dim + 1 :])


@dataclass(frozen=True)
class Leaf:
    """A tensor of the source itself."""

    name: str
    shape: Shape

    def read(self, source: Source, box: Box) -> Tensor:
        """Return a box of the tensor."""
        return source.read(self.name, box)

    def leaves(self) -> Iterator[str]:
        """Yield the tensor's name."""
        yield self.name


@dataclass(frozen=True)
class Concatenated:
    """Tensors one after the other along `dim`. They are read one after the other into the result."""

    parts: tuple[Expression, ...]
    dim: int

    @property
    def shape(self) -> Shape:
        """Shape of the whole tensor."""
        first = self.parts[0].shape
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :])

    def read(self, source: Source, box: Box) -> Tensor:
        """Return a box of the tensor, of the dtype of its first part."""
        found, start, wanted = None, 0, box[self.dim]
        for part in self.parts:
            size = part.shape[self.dim]
            inner = slice(max(wanted.start - start, 0), min(wanted.stop - start, size))
            if inner.start < inner.stop:
                piece = part.read(source, _replaced(box, self.dim, inner))
                if found is None:
                    found = piece if _sizes(box) == tuple(piece.shape) else piece.new_empty(_sizes(box))
                if found is not piece:
                    place = start + inner.start - wanted.start
                    found.narrow(self.dim, place, piece.shape[self.dim]).copy_(piece)
            start += size
        if found is None:
            return self.parts[0].read(source, tuple(slice(0, 0) for _ in box)).new_empty(_sizes(box))
        return found

    def leaves(self) -> Iterator[str]:
        """Yield the names of the parts' tensors."""
        for part in self.parts:
            yield from part.leaves()


@dataclass(frozen=True)
class _Changed:
    """A tensor in another form."""

    of: Expression

    def leaves(self) -> Iterator[str]:
        """Yield the names of the tensors of the source that the tensor consists of."""
        yield from self.of.leaves()


@dataclass(frozen=True)
class Unsqueezed(_Changed):
    """A tensor with a further dimension of size 1 at `dim`."""

    dim: int

    @property
    def shape(self) -> Shape:
        """Shape of the whole tensor."""
        return (*self.of.shape[: self.dim], 1, *self.of.shape[self.dim :])

    def read(self, source: Source, box: Box) -> Tensor:
        """Return a box of the tensor."""
        found = self.of.read(source, (*box[: self.dim], *box[self.dim + 1 :])).unsqueeze(self.dim)
        return found[_replaced(whole(tuple(found.shape)), self.dim, box[self.dim])]


def stacked(parts: tuple[Expression, ...], dim: int) -> Concatenated:
    """Return tensors of one shape, stacked along a new dimension."""
    return Concatenated(tuple(Unsqueezed(part, dim) for part in parts), dim)


@dataclass(frozen=True)
class Part(_Changed):
    """A range of a tensor along `dim`."""

    dim: int
    start: int
    stop: int

    @property
    def shape(self) -> Shape:
        """Shape of the range."""
        return (*self.of.shape[: self.dim], self.stop - self.start, *self.of.shape[self.dim + 1 :])

    def read(self, source: Source, box: Box) -> Tensor:
        """Return a box of the range."""
        part = box[self.dim]
        return self.of.read(source, _replaced(box, self.dim, slice(part.start + self.start, part.stop + self.start)))


@dataclass(frozen=True)
class Selected(_Changed):
    """The tensor at `index` along `dim`."""

    dim: int
    index: int

    @property
    def shape(self) -> Shape:
        """Shape of the tensor, without `dim`."""
        return (*self.of.shape[: self.dim], *self.of.shape[self.dim + 1 :])

    def read(self, source: Source, box: Box) -> Tensor:
        """Return a box of the tensor."""
        box = (*box[: self.dim], slice(self.index, self.index + 1), *box[self.dim :])
        return self.of.read(source, box).squeeze(self.dim)


@dataclass(frozen=True)
class Transposed(_Changed):
    """A tensor with two dimensions swapped."""

    first: int
    second: int

    def _swapped(self, values: tuple) -> tuple:
        swapped = list(values)
        swapped[self.first], swapped[self.second] = values[self.second], values[self.first]
        return tuple(swapped)

    @property
    def shape(self) -> Shape:
        """Shape of the whole tensor."""
        return self._swapped(self.of.shape)

    def read(self, source: Source, box: Box) -> Tensor:
        """Return a box of the tensor."""
        return self.of.read(source, self._swapped(box)).transpose(self.first, self.second)


@dataclass(frozen=True)
class Regrouped(_Changed):
    """A tensor whose indices along `dim`, seen as [groups, rows, columns], are reordered to [groups, columns, rows]."""

    dim: int
    groups: int
    rows: int

    @property
    def shape(self) -> Shape:
        """Shape of the whole tensor."""
        return self.of.shape

    def read(self, source: Source, box: Box) -> Tensor:
        """Return a box of the tensor. It reads the whole extent along `dim`."""
        order = torch.arange(self.shape[self.dim]).view(self.groups, self.rows, -1).transpose(1, 2).flatten()
        read = self.of.read(source, _replaced(box, self.dim, slice(0, self.shape[self.dim])))
        return read.index_select(self.dim, order[box[self.dim]].to(read.device))

    def inverse_of(self, of: Expression) -> Regrouped:
        """Return `of`, a tensor in the order of this one, in the order from which this one was made."""
        return Regrouped(of, self.dim, self.groups, self.shape[self.dim] // self.groups // self.rows)


def parts_of(of: Expression, dim: int, sizes: list[int]) -> list[Expression]:
    """Return ranges of a tensor, one after the other."""
    stops = list(accumulate(sizes))
    return [Part(of, dim, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
