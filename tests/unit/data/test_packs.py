from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlite.data.packs import check_batch, lazy_pack, sequence_lengths, split_batch
from rlite.errors import DataError

CPU = torch.device("cpu")


def make_batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    width = max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.arange(len(lengths) * width).view(len(lengths), width)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "rewards": torch.arange(len(lengths)).float(),
        "columns": torch.arange(len(lengths))[:, None],
        "vectors": ids[..., None].expand(-1, -1, 3),
    }


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6).filter(lambda lengths: max(lengths) > 1), st.randoms())
def test_a_pack_holds_any_rows_in_any_order_end_to_end(lengths: list[int], random) -> None:
    batch = make_batch(lengths)
    check_batch(batch)
    rows = random.sample(range(len(lengths)), random.randint(1, len(lengths)))
    data = dict(lazy_pack(batch, rows, CPU))
    assert data["cu_seqlens"].tolist() == [sum(lengths[r] for r in rows[:i]) for i in range(len(rows) + 1)]
    assert data["max_seqlen"] == max(lengths[r] for r in rows)
    assert data["position_ids"].tolist() == [step for r in rows for step in range(lengths[r])]
    assert data["rewards"].tolist() == rows
    assert data["columns"].tolist() == [[r] for r in rows]
    for key in ("input_ids", "vectors"):
        for row, values in zip(rows, data[key].split([lengths[row] for row in rows]), strict=True):
            assert torch.equal(values, batch[key][row, : lengths[row]])


def test_sequence_lengths_count_the_mask() -> None:
    assert sequence_lengths(make_batch([3, 1, 4])) == [3, 1, 4]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_mask": None}, "missing: attention_mask"),
        ({"input_ids": torch.zeros(2, 4)}, "expected both"),
        ({"rewards": torch.zeros(3)}, r"rewards \(3,\): expected \[2\] or \[2, 3\]"),
        ({"attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}, "row 1: .*right padding"),
        ({"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}, "row 0: .*right padding"),
        ({"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "row 1: .*and not all zeros"),
    ],
)
def test_a_batch_of_another_form_is_refused_with_the_key_or_row(changes: dict, words: str) -> None:
    batch = {**make_batch([3, 2]), **changes}
    with pytest.raises(DataError, match=words):
        check_batch({key: value for key, value in batch.items() if value is not None})


def test_a_key_of_a_lazy_pack_is_packed_when_it_is_first_read() -> None:
    batch = make_batch([2, 3])
    data = lazy_pack(batch, [1, 0], CPU)
    batch["rewards"][:] = 7
    assert data["rewards"].tolist() == [7, 7]
    batch["rewards"][:] = 8
    assert data["rewards"].tolist() == [7, 7]
    assert (
        list(data) == list(dict(lazy_pack(batch, [1, 0], CPU))) == [*batch, "cu_seqlens", "position_ids", "max_seqlen"]
    )
    assert data.get("margin") is None
    assert "rewards" in data
    assert {**data, "scale": 2}["rewards"].tolist() == [7, 7]
    assert (data | {"rewards": 1})["rewards"] == 1
    assert data.copy()["columns"].tolist() == [[1], [0]]
    with pytest.raises(KeyError, match="margin"):
        data["margin"]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6).filter(lambda lengths: max(lengths) > 1), st.randoms())
def test_several_values_per_token_are_packed_end_to_end_and_go_through_any_split(lengths: list[int], random) -> None:
    width = max(lengths)
    values: list[list[list[int]]] = [
        [[], *([random.randrange(99) for _ in range(random.randrange(4))] for _ in range(length - 1))]
        for length in lengths
    ]
    flat = [[value for token in row for value in token] for row in values]
    batch = {
        **make_batch(lengths),
        "kept_counts": torch.tensor([[len(token) for token in row] + [0] * (width - len(row)) for row in values]),
        "kept_ids": torch.tensor([row + [-1] * (max(map(len, flat)) + 1 - len(row)) for row in flat]),
    }
    check_batch(batch)
    rows = random.sample(range(len(lengths)), random.randint(1, len(lengths)))
    data = dict(lazy_pack(batch, rows, CPU))
    assert data["kept_ids"].tolist() == [value for row in rows for value in flat[row]]
    assert data["kept_counts"].tolist() == [len(token) for row in rows for token in values[row]]
    shares = split_batch("test", batch, 2, max(lengths) + 3)
    for share in shares:
        for microbatch in filter(None, share.microbatches):
            data = dict(lazy_pack(share.batch, microbatch, CPU))
            own = [share.rows[row] for row in microbatch]
            assert data["kept_ids"].tolist() == [value for row in own for value in flat[row]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kept_ids": None}, r"expected kept_ids \[2, M\] with kept_counts \[2, 3\]"),
        ({"kept_counts": torch.zeros(2, 2)}, r"kept_counts \(2, 2\): expected \[2\] or \[2, 3\]"),
        ({"kept_ids": torch.zeros(2)}, r"kept_ids is torch.float32 \[2\]; expected whole numbers \[2, M\]"),
        ({"kept_counts": torch.tensor([[0, 1, 2], [0, 0, 0]])}, "counts 3 values in a row, and kept_ids has 2"),
        ({"kept_counts": torch.tensor([[1, 0, 0], [0, 0, 0]])}, "0 for the first token of a row"),
        ({"kept_counts": torch.tensor([[0, 1, 1], [0, 0, 1]])}, "and for padding"),
    ],
)
def test_several_values_per_token_must_be_as_many_as_counted(changes: dict, words: str) -> None:
    kept = {"kept_counts": torch.tensor([[0, 1, 1], [0, 0, 0]]), "kept_ids": torch.zeros(2, 2, dtype=torch.int32)}
    batch = {**make_batch([3, 2]), **kept, **changes}
    with pytest.raises(DataError, match=words):
        check_batch({key: value for key, value in batch.items() if value is not None})
