"""The plan of a weight sync (pure): for each box of the target, the source boxes that cover it, each element once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rlite.errors import WeightSyncError
from rlite.runtime.parallel.shards import Box
from rlite.runtime.replicas.transport import Layout, Piece, Place


def make_plan(sources: Sequence[Layout], targets: Sequence[Layout], target_name: str) -> list[list[Piece]]:
    """Return the pieces that write every element of some target workers exactly once, for each worker.

    `targets`: layouts of the workers that hold one copy of the target together. A worker may lack tensors that another
    holds.
    """
    aliases = sources[0].aliases
    held: dict[str, list[tuple[int, Place]]] = {}
    for index, layout in enumerate(sources):
        for name, place in layout.places.items():
            held.setdefault(name, []).append((index, place))
    wanted = dict.fromkeys(name for layout in targets for name in layout.places)
    missing = sorted(name for name in wanted if aliases.get(name, name) not in held)
    unexpected = sorted(held.keys() - {aliases.get(name, name) for name in wanted})
    if missing or unexpected:
        raise WeightSyncError(
            f"the source does not fit {target_name}: missing in the source: {missing[:5]} ({len(missing)}), "
            f"unknown to the target: {unexpected[:5]} ({len(unexpected)}). Are they the same model, tied alike?"
        )

    def pieces_of(name: str, place: Place) -> Iterator[Piece]:
        source_name = aliases.get(name, name)
        covered = 0
        for index, offered in held[source_name]:
            if offered.global_shape != place.global_shape:
                shapes = f"shape {place.global_shape}, the source {offered.global_shape}"
                raise WeightSyncError(f"{name}: {target_name} has {shapes}")
            overlap = _overlap(offered, place)
            if overlap is not None:
                yield Piece(name, source_name, index, *overlap, place.dtype)
                covered += math.prod(s.stop - s.start for s in overlap[0])
        if covered != math.prod(place.shape):
            whole = f"the {math.prod(place.shape)} elements that {target_name} holds"
            raise WeightSyncError(f"{name}: the source's shards cover {covered} of {whole}, each to be written once")

    return [[piece for each in layout.places.items() for piece in pieces_of(*each)] for layout in targets]


def _overlap(source: Place, target: Place) -> tuple[Box, Box] | None:
    """Return the boxes that both places share, relative to each place; None if they share nothing."""
    own: list[slice] = []
    others: list[slice] = []
    places = zip(source.offset, source.shape, target.offset, target.shape, strict=True)
    for own_offset, own_size, offset, size in places:
        start, stop = max(own_offset, offset), min(own_offset + own_size, offset + size)
        if start >= stop:
            return None
        own.append(slice(start - own_offset, stop - own_offset))
        others.append(slice(start - offset, stop - offset))
    return tuple(own), tuple(others)
