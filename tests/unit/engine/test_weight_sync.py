from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlite.engine.weight_plan import make_plan
from rlite.errors import WeightSyncError
from rlite.runtime.replicas.transport import Layout, Place, make_buckets

Shape = tuple[int, ...]
NAMES = ("a", "b", "c")


def place(shape: Shape, offset: Shape, global_shape: Shape) -> Place:
    return Place(torch.float32, offset, shape, global_shape)


@st.composite
def shardings(draw: st.DrawFn, shape: Shape) -> list[Place]:
    """The cells of a grid over a tensor: any cut, uneven and even empty, along any axis."""
    cuts = [sorted([0, size, *draw(st.lists(st.integers(0, size), max_size=2))]) for size in shape]
    spans = [list(pairwise(cut)) for cut in cuts]
    return [
        place(tuple(stop - start for start, stop in cell), tuple(start for start, _ in cell), shape)
        for cell in product(*spans)
    ]


@st.composite
def engines(draw: st.DrawFn, shapes: dict[str, Shape]) -> list[Layout]:
    """Workers that hold together every element of every tensor once; who has no cell holds an empty one."""
    cells = {name: draw(shardings(shape)) for name, shape in shapes.items()}
    workers = []
    for number in range(max(map(len, cells.values()))):
        places = {
            name: held[number]
            if number < len(held)
            else place((0,) * len(shapes[name]), (0,) * len(shapes[name]), shapes[name])
            for name, held in cells.items()
        }
        workers.append(Layout(places, "host"))
    return workers


@given(st.data())
def test_any_sharding_is_planned_onto_any_other_and_each_element_is_written_once(data: st.DataObject) -> None:
    ranks = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
    shapes = {name: data.draw(ranks) for name in NAMES}
    sources, targets = data.draw(engines(shapes)), data.draw(engines(shapes))
    whole = {name: torch.arange(math.prod(shape)).view(shape) for name, shape in shapes.items()}

    def box(p: Place) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(p.offset, p.shape, strict=True))

    for target, pieces in zip(targets, make_plan(sources, targets, "target"), strict=True):
        written = {name: torch.full(p.shape, -1) for name, p in target.places.items()}
        times = {name: torch.zeros(p.shape, dtype=torch.int) for name, p in target.places.items()}
        for piece in pieces:
            held = whole[piece.source_name][box(sources[piece.source].places[piece.source_name])]
            written[piece.name][piece.target_box] = held[piece.source_box]
            times[piece.name][piece.target_box] += 1
        for name, p in target.places.items():
            assert torch.equal(written[name], whole[name][box(p)])
            assert bool((times[name] == 1).all())


def layout(aliases: dict[str, str] | None = None, **shapes: Shape) -> Layout:
    whole = {name: place(shape, (0,) * len(shape), shape) for name, shape in shapes.items()}
    return Layout(whole, "host", aliases or {})


def test_a_tied_source_serves_a_target_that_is_tied_or_calls_it_by_the_other_name() -> None:
    source = layout({"head": "embedding"}, embedding=(4, 2))
    ((piece,),) = make_plan([source], [layout(embedding=(4, 2))], "target")
    assert (piece.name, piece.source_name) == ("embedding", "embedding")
    ((piece,),) = make_plan([source], [layout(head=(4, 2))], "target")
    assert (piece.name, piece.source_name) == ("head", "embedding")


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (layout(a=(2,)), layout(a=(2,), b=(3,)), r"missing in the source: \['b'\]"),
        (layout(a=(2,), b=(3,)), layout(a=(2,)), r"unknown to the target: \['b'\]"),
        (layout(a=(2,)), layout(a=(3,)), r"a: target has shape \(3,\), the source \(2,\)"),
        (Layout({"a": place((1,), (0,), (2,))}, "host"), layout(a=(2,)), "cover 1 of the 2 elements"),
    ],
)
def test_mismatched_layouts_are_named(source: Layout, target: Layout, words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        make_plan([source], [target], "target")


def test_a_source_that_offers_an_element_twice_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="cover 4 of the 2 elements"):
        make_plan([layout(a=(2,)), layout(a=(2,))], [layout(a=(2,))], "target")


@given(st.data())
def test_buckets_hold_every_box_of_every_source_once_within_their_size(data: st.DataObject) -> None:
    shapes = {name: data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=2).map(tuple)) for name in NAMES}
    sources = data.draw(engines(shapes))
    most = data.draw(st.integers(64, 4096))
    buckets = make_buckets(sources, most)
    carried = [(bucket.source, name) for bucket in buckets for name in bucket.places]
    assert sorted(carried) == sorted((i, name) for i, source in enumerate(sources) for name in source.places)
    assert all(bucket.nbytes <= most or len(bucket.places) == 1 for bucket in buckets)
    assert all(sources[b.source].places[n] == p for b in buckets for n, p in b.places.items())


def test_workers_of_one_copy_may_hold_different_tensors_but_all_of_them_together() -> None:
    source, stages = layout(a=(2,), b=(3,)), [layout(a=(2,)), layout(b=(3,)), layout()]
    plan = make_plan([source], stages, "target")
    assert [[piece.name for piece in pieces] for pieces in plan] == [["a"], ["b"], []]
    with pytest.raises(WeightSyncError, match=r"unknown to the target: \['b'\]"):
        make_plan([source], [stages[0], stages[2]], "target")
