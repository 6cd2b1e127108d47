"""Mixtures of sources: their shares, their epochs, and going on exactly where an order was."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlite.data.mixture import MixedOrder, Mixture
from rlite.data.prompts import ShuffledOrder
from rlite.data.rows import prompt_stream
from rlite.data.tokens import BatchLoader, TokenRows, mixed, tokenise
from rlite.errors import CheckpointError, ConfigError, DataError

SOURCES = st.dictionaries(
    st.sampled_from("abcd"), st.tuples(st.integers(1, 12), st.floats(0.1, 10)), min_size=1, max_size=4
)


def mixture(sources: dict[str, tuple[int, float]]) -> Mixture:
    made = Mixture({name: size for name, (size, _) in sources.items()}, {n: w for n, (_, w) in sources.items()})
    try:
        assert sum(made.counts.values()) == made.num_items
    except ConfigError:
        assume(False)
    return made


@given(SOURCES, st.integers(0, 99))
def test_every_epoch_has_the_shares_of_the_weights(sources: dict[str, tuple[int, float]], seed: int) -> None:
    made = mixture(sources)
    order = MixedOrder(made, seed)
    scale = sum(made.weights.values())
    dealt: list[int] = []
    for epoch in range(3):
        assert (order.epoch, order.left_in_epoch) == (epoch, made.num_items)
        dealt += order.take(made.num_items)
        counts = Counter(made.source_of(item)[0] for item in dealt[-made.num_items :])
        for name in made.sizes:
            assert abs(counts[name] - made.num_items * made.weights[name] / scale) < 1
    for name, size in made.sizes.items():
        own = [number for source, number in map(made.source_of, dealt) if source == name]
        for start in range(0, len(own), size):  # a source's items come again after all others of it
            assert len(set(own[start : start + size])) == len(own[start : start + size])


@given(SOURCES, st.data())
def test_a_restored_order_continues_at_any_position(sources: dict[str, tuple[int, float]], data: st.DataObject) -> None:
    made = mixture(sources)
    stop = data.draw(st.integers(0, 3 * made.num_items))
    whole = MixedOrder(made, seed=1).take(stop + 20)
    first = MixedOrder(made, seed=1)
    first.take(stop)
    state = json.loads(json.dumps(first.state_dict()))
    second = MixedOrder(made, seed=2)
    second.load_state_dict(state)
    assert second.position == stop
    assert second.take(20) == whole[stop:]
    assert {name: part["num_items"] for name, part in state["sources"].items()} == made.sizes


def test_without_weights_every_item_occurs_once_in_an_epoch_and_seeds_differ() -> None:
    made = Mixture({"a": 5, "b": 3}, {"a": 5, "b": 3})
    first, second = (MixedOrder(made, seed).take(8) for seed in (0, 1))
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert str(made) == "a 62.5%, b 37.5%"


def test_weight_without_an_item_per_epoch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mixture\.b\.weight=0\.001 of 1\.001 gives no item in an epoch of 10 items"):
        MixedOrder(Mixture({"a": 5, "b": 5}, {"a": 1, "b": 0.001}), seed=0)


def test_a_state_of_other_sources_is_refused() -> None:
    order = MixedOrder(Mixture({"a": 5, "b": 3}, {"a": 1, "b": 1}), seed=0, digest=lambda: "x")
    state = order.state_dict()
    with pytest.raises(CheckpointError, match="made with the sources a, b; now there are a, c"):
        MixedOrder(Mixture({"a": 5, "c": 3}, {"a": 1, "c": 1}), seed=0).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"mixture\.a: the checkpoint was made with 5 items of data; now .* 4"):
        MixedOrder(Mixture({"a": 4, "b": 4}, {"a": 1, "b": 1}), seed=0).load_state_dict(state)
    with pytest.raises(CheckpointError, match="of no mixture"):
        order.load_state_dict(ShuffledOrder(8, seed=0).state_dict())
    with pytest.raises(CheckpointError, match="another content"):
        MixedOrder(Mixture({"a": 5, "b": 3}, {"a": 1, "b": 1}), 0, lambda: "y").load_state_dict(state)


def tokens(first: int, count: int) -> TokenRows:
    """Pairs of rows that say their number."""
    pairs = lambda numbers: [  # noqa: E731
        [(np.array([first + n, side], dtype=np.int32), np.array([False, True])) for side in range(2)] for n in numbers
    ]
    made = tokenise(count, pairs, 8, "x", rows_per_item=2)
    made.per_row["pair_ids"] = np.repeat(np.arange(count), 2)
    return made


def test_token_rows_of_several_sources_are_one_table() -> None:
    rows = mixed({"a": tokens(10, 4), "b": tokens(20, 6)}, {"a": 1, "b": 3})
    assert [int(rows.batch([item])["input_ids"][0, 0]) for item in range(10)] == [*range(10, 14), *range(20, 26)]
    assert rows.batch([0, 4])["pair_ids"].tolist() == [0, 0, 4, 4]
    assert (rows.tally.num_read, rows.tally.num_kept) == (10, 10)
    dealt = [batch["input_ids"][::2, 0].tolist() for batch in BatchLoader(rows, 4, seed=0, n_epochs=2)]
    assert [len(batch) for batch in dealt] == [4, 4, 2] * 2
    counts = Counter(number // 10 for batch in dealt for number in batch)
    assert counts == {1: 4, 2: 16} or counts == {1: 6, 2: 14}  # 2.5 of 10 in an epoch, up to one
    with pytest.raises(ConfigError, match=r"row index 0 of data\.mixture\.a has 4 tokens"):
        rows.check_capacity(3, "n")


def test_sources_with_and_without_a_margin_are_not_mixed() -> None:
    other = tokens(0, 2)
    other.per_row["margin"] = np.zeros(4)
    with pytest.raises(DataError, match="mixture: one of a and b has margin, the other has none"):
        mixed({"a": tokens(0, 2), "b": other}, None)


def test_a_stream_of_prompts_mixes_and_resumes() -> None:
    rows = [{"prompt": f"{name}{n}"} for name, count in (("a", 3), ("b", 9)) for n in range(count)]
    made = Mixture({"a": 3, "b": 9}, {"a": 2, "b": 1})
    stream = prompt_stream(rows, 6, 0, made)
    first = [row["prompt"][0] for _ in range(2) for row in stream.next()]
    assert Counter(first) == {"a": 8, "b": 4}
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = prompt_stream(rows, 6, 5, made)
    resumed.load_state_dict(state)
    assert resumed.next() == stream.next()
