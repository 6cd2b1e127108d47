from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from rlite.data.dispatch import (
    NeedParallel,
    Shares,
    deal,
    gather,
    gather_of,
    gathered,
    num_rows,
    plan_shares,
    scatter,
    split,
)
from rlite.errors import ConfigError, DataError

CONTAINERS = {
    "list": lambda ids: list(ids),
    "tuple": lambda ids: tuple(ids),
    "nested lists": lambda ids: [[i] * (i % 3 + 1) for i in ids],
    "strings": lambda ids: [str(i) for i in ids],
    "tensor": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "matrix": lambda ids: torch.tensor(ids, dtype=torch.float64).reshape(-1, 1).repeat(1, 3),
    "array": lambda ids: np.array(ids, dtype=np.int16).reshape(-1, 1),
    "tensordict": lambda ids: TensorDict(
        {"ids": torch.tensor(ids, dtype=torch.int64), "nested": {"x": torch.tensor(ids, dtype=torch.float32)[:, None]}},
        batch_size=[len(ids)],
    ),
    "dict": lambda ids: {"a": list(ids), "b": {"c": torch.tensor(ids, dtype=torch.int64), "d": tuple(map(str, ids))}},
}
containers = st.sampled_from(sorted(CONTAINERS))
ranks = st.integers(1, 9)


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type, down to dtypes and shapes."""
    if isinstance(a, TensorDict):
        return isinstance(b, TensorDict) and a.batch_size == b.batch_size and same(a.to_dict(), b.to_dict())
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


# Rows over data-parallel ranks


@given(containers, st.integers(0, 40), ranks, st.booleans(), st.data())
def test_nothing_is_lost_or_repeated_and_the_order_comes_back(
    kind: str, count: int, num_ranks: int, is_balanced: bool, data: st.DataObject
) -> None:
    value = CONTAINERS[kind](list(range(count)))
    weights = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)) if is_balanced else None
    marked = NeedParallel(value, balance_by=weights)
    shares = plan_shares((marked,), {}, num_ranks, allow_empty=True)
    assert shares is not None
    assert pickle.loads(pickle.dumps(shares)) == shares
    calls = scatter((marked, "copied"), {}, num_ranks, shares=shares, allow_empty=True)
    parts = [args[0] for args, _ in calls]
    assert len(parts) == num_ranks
    for part, rows in zip(parts, shares.rows, strict=True):  # also empty shares are well typed
        assert same(part, CONTAINERS[kind](list(rows)))
    assert same(gather(parts, "concatenate", shares), value)


@given(st.integers(0, 100), ranks)
def test_contiguous_shares_differ_by_at_most_one_row_and_the_larger_come_first(count: int, num_ranks: int) -> None:
    shares = Shares.contiguous(count, num_ranks)
    sizes = [len(rows) for rows in shares.rows]
    assert isinstance(shares.positions, range)
    assert sum(sizes) == count
    assert len(sizes) == num_ranks
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(("count", "num_ranks", "sizes"), [(7, 2, [4, 3]), (5, 4, [2, 1, 1, 1]), (9, 8, [2] + [1] * 7)])
def test_uneven_rows_are_shared_as_documented(count: int, num_ranks: int, sizes: list[int]) -> None:
    calls = scatter((NeedParallel([[1, 2, 3]] * count), 2), {"lr": 0.1}, num_ranks)
    assert [len(args[0]) for args, _ in calls] == sizes
    assert all(args[1] == 2 and kwargs == {"lr": 0.1} for args, kwargs in calls)


def test_shares_of_consecutive_rows_are_views_of_a_tensor() -> None:
    rows = torch.arange(10)
    first, second = split(rows, Shares.contiguous(10, 2))
    assert first.data_ptr() == rows.data_ptr()
    assert second.data_ptr() == rows[5:].data_ptr()
    same_rows = split(rows, Shares(((0, 1, 2, 3), (4, 5, 6, 7, 8, 9))))[0]
    assert same_rows.data_ptr() == rows.data_ptr()


def test_unmarked_arguments_are_the_same_object_on_every_rank() -> None:
    model, options = object(), {"a": [1, 2]}
    calls = scatter((NeedParallel([1, 2]), model), {"options": options}, 2)
    assert all(args[1] is model and kwargs["options"] is options for args, kwargs in calls)


def test_a_call_without_marked_arguments_is_copied() -> None:
    assert plan_shares(([1, 2],), {}, 2) is None
    assert scatter(([1, 2],), {"x": 3}, 2) == [(([1, 2],), {"x": 3})] * 2


# Balance


LENGTHS = [9, 1, 1, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("value", "balance_by"),
    [
        ([[0] * n for n in LENGTHS], "tokens"),
        ([torch.zeros(n) for n in LENGTHS], "tokens"),
        ([{"input_ids": [0] * n} for n in LENGTHS], "tokens"),
        ([{"attention_mask": [1] * n + [0] * 9, "input_ids": [0] * (n + 9)} for n in LENGTHS], "tokens"),
        ({"input_ids": [[0] * n for n in LENGTHS]}, "tokens"),
        (TensorDict({"attention_mask": torch.arange(9) < torch.tensor(LENGTHS)[:, None]}, batch_size=[10]), "tokens"),
        ({"attention_mask": np.arange(9) < np.array(LENGTHS)[:, None]}, "tokens"),
        (list(range(10)), LENGTHS),
        (torch.arange(10), torch.tensor(LENGTHS)),
        ([[0] * n for n in LENGTHS], len),
        ({"n": torch.tensor(LENGTHS)}, lambda row: row["n"]),
        (TensorDict({"n": torch.tensor(LENGTHS)}, batch_size=[10]), lambda row: row["n"]),
    ],
)
def test_one_long_row_weighs_as_much_as_nine_short_ones(value: Any, balance_by: Any) -> None:
    shares = plan_shares((NeedParallel(value, balance_by=balance_by),), {}, 2)
    assert shares is not None
    assert [list(rows) for rows in shares.rows] == [[0], list(range(1, 10))]


def test_arguments_of_one_call_follow_the_one_that_is_balanced() -> None:
    ids = [[0] * n for n in LENGTHS]
    calls = scatter((NeedParallel(ids, balance_by="tokens"),), {"rewards": NeedParallel(torch.arange(10))}, 2)
    assert [(len(args[0]), kwargs["rewards"].tolist()) for args, kwargs in calls] == [(1, [0]), (9, list(range(1, 10)))]


def test_arguments_balanced_by_different_weights_are_refused_by_name() -> None:
    args = (NeedParallel([1, 2, 3], balance_by=[5, 1, 1]),)
    with pytest.raises(ValueError, match="argument 0 and argument 'x' are balanced by different weights"):
        scatter(args, {"x": NeedParallel([1, 2, 3], balance_by=[1, 1, 5])}, 2)


def test_weights_must_fit_the_rows() -> None:
    with pytest.raises(ValueError, match="argument 0 has 3 rows, and balance_by has 2 weights"):
        scatter((NeedParallel([1, 2, 3], balance_by=[5, 1]),), {}, 2)
    with pytest.raises(ValueError, match="rows with a length; found a int"):
        scatter((NeedParallel([1, 2, 3], balance_by="tokens"),), {}, 2)
    with pytest.raises(ValueError, match="attention_mask or input_ids; found \\['x'\\]"):
        scatter((NeedParallel({"x": [[1], [2]]}, balance_by="tokens"),), {}, 2)
    with pytest.raises(DataError, match="row 1 has weight -1"):
        scatter((NeedParallel([1, 2], balance_by=[1, -1]),), {}, 2)


# What is refused


def test_arguments_with_different_numbers_of_rows_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="argument 1 has 3 rows and argument 'mask' has 2"):
        scatter((0, NeedParallel([1, 2, 3])), {"mask": NeedParallel(torch.zeros(2))}, 2)
    with pytest.raises(ValueError, match=r"argument 0 is a dict whose entries .* {'a': 2, 'b': 1}"):
        scatter((NeedParallel({"a": [1, 2], "b": [1]}),), {}, 1)


def test_fewer_rows_than_ranks_are_refused_with_the_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"argument 0 has 3 rows for 4 .*at least 4 rows, or .*data_parallel_size of at most 3"
    ):
        scatter((NeedParallel([1, 2, 3]),), {}, 4)
    assert [args[0] for args, _ in scatter((NeedParallel((1,)),), {}, 3, allow_empty=True)] == [(1,), (), ()]


@pytest.mark.parametrize(
    "value", [3, "text", None, torch.tensor(1), np.float32(1), TensorDict({}, []), {"a": {"b": 1}}]
)
def test_values_without_rows_are_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match="argument 'x'"):
        scatter((), {"x": NeedParallel(value)}, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: NeedParallel([1], type="pp"),  # type: ignore[arg-type]
        lambda: NeedParallel([1], balance_by="token"),  # type: ignore[arg-type]
        lambda: NeedParallel([1], type="seq", balance_by="tokens"),
        lambda: NeedParallel(NeedParallel([1])),
        lambda: gathered("concat"),  # type: ignore[arg-type]
    ],
)
def test_an_option_that_does_not_exist_is_refused_where_it_is_written(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


# Sequences over context-parallel ranks


@given(st.integers(1, 4), st.integers(4, 12), ranks.filter(lambda n: n <= 4), st.integers(1, 3))
def test_sequences_are_cut_along_dimension_one_and_join_again(rows: int, length: int, seq: int, dp: int) -> None:
    ids = torch.arange(rows * length).view(rows, length)
    batch = TensorDict({"ids": ids, "rewards": torch.arange(rows)}, batch_size=[rows])
    marked = (NeedParallel(ids, "seq"), NeedParallel(batch, "seq"), NeedParallel(ids.tolist(), "seq"))
    calls = scatter(marked, {}, dp, seq)
    assert len(calls) == dp * seq
    for group in (calls[i * seq : (i + 1) * seq] for i in range(dp)):  # data-parallel rank first
        tensors, batches, lists = zip(*(args for args, _ in group), strict=True)
        assert torch.equal(torch.cat(tensors, 1), ids)
        assert torch.equal(torch.cat([part["ids"] for part in batches], 1), ids)
        assert all(torch.equal(part["rewards"], batch["rewards"]) for part in batches)
        assert [list(chain(*pieces)) for pieces in zip(*lists, strict=True)] == ids.tolist()
        sizes = [part.shape[1] for part in tensors]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
    assert set(batch.keys()) == {"ids", "rewards"}
    assert torch.equal(batch["ids"], ids)


def test_rows_and_sequences_can_be_split_in_one_call() -> None:
    ids = torch.arange(24).view(4, 6)
    calls = scatter((NeedParallel(NeedParallel(ids, "dp"), "seq"), NeedParallel(list("abcd"))), {}, 2, 2)
    expected = [ids[:2, :3], ids[:2, 3:], ids[2:, :3], ids[2:, 3:]]
    assert all(torch.equal(args[0], part) for (args, _), part in zip(calls, expected, strict=True))
    assert [args[1] for args, _ in calls] == [["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]]


def test_sequences_that_cannot_be_cut_together_are_refused() -> None:
    with pytest.raises(ValueError, match="argument 0 and argument 'y' have sequences of different lengths"):
        scatter((NeedParallel([[1, 2, 3]], "seq"),), {"y": NeedParallel([[1, 2]], "seq")}, 1, 2)
    with pytest.raises(ValueError, match="at most 2 tokens for 3 context-parallel ranks"):
        scatter((NeedParallel([[1, 2]], "seq"),), {}, 1, 3)
    for value in ([1, 2, 3], ["text"], torch.zeros(3)):
        with pytest.raises(TypeError, match="no sequence dimension"):
            scatter((NeedParallel(value, "seq"),), {}, 1, 2)


# Role groups


def test_lists_with_one_item_per_target_are_split() -> None:
    assert deal(([10, 11], "x"), {"y": [1, 2]}, 2, auto_shard=True) == [((10, "x"), {"y": 1}), ((11, "x"), {"y": 2})]


@pytest.mark.parametrize(
    ("args", "auto_shard"),
    [(([1, 2],), False), (([1, 2, 3],), True), (([1, 2], [1]), True), (((1, 2),), True), ((7,), True)],
)
def test_everything_else_is_copied_to_each_target(args: tuple[Any, ...], auto_shard: bool) -> None:
    assert deal(args, {}, 2, auto_shard) == [(args, {}), (args, {})]


@pytest.mark.parametrize("auto_shard", [True, False])
def test_marked_arguments_are_always_split_over_targets(auto_shard: bool) -> None:
    calls = deal((NeedParallel(list("abcde")), 0.7), {}, 4, auto_shard)
    assert calls == [((["a", "b"], 0.7), {}), ((["c"], 0.7), {}), ((["d"], 0.7), {}), ((["e"], 0.7), {})]


def test_share_with_one_item_per_target_is_not_split_again() -> None:
    calls = deal((NeedParallel([1, 2, 3, 4]), ["x", "y"]), {}, 2, auto_shard=True)
    assert calls == [(([1, 2], "x"), {}), (([3, 4], "y"), {})]


def test_a_role_group_does_not_cut_sequences() -> None:
    with pytest.raises(ValueError, match="argument 0 is NeedParallel"):
        deal((NeedParallel([[1, 2]], "seq"),), {}, 2, auto_shard=True)


# Results


def test_a_method_states_how_its_results_are_gathered() -> None:
    class Module:
        @gathered("mean")
        def loss(self) -> float:
            return 0.0

        def step(self) -> None: ...

    assert gather_of(Module().loss) == "mean"
    assert gather_of(Module.step) == "list"


def test_results_are_gathered_as_asked() -> None:
    assert gather([[1], 2]) == [[1], 2]
    assert gather([5, 6], "first") == 5
    assert gather([{"a": 1, "b": {"c": torch.tensor([1, 2])}}, {"a": 2, "b": {"c": torch.tensor([3, 2])}}], "mean") == {
        "a": 1.5,
        "b": {"c": pytest.approx(torch.tensor([2.0, 2.0]))},
    }
    assert gather([torch.tensor(True), torch.tensor(True)], "mean").item() == 1.0
    assert gather([(1, 2), (3,)], "concatenate") == (1, 2, 3)


def test_ranks_without_rows_do_not_count_in_a_mean() -> None:
    assert gather([2.0, 4.0, float("nan")], "mean", Shares.contiguous(2, 3)) == 3.0
    assert gather([torch.zeros(1, 5), torch.zeros(1, 5), []], "concatenate", Shares.contiguous(2, 3)).shape == (2, 5)


def test_several_results_per_row_keep_their_order_when_shares_are_contiguous() -> None:
    assert gather([[1, 2, 3, 4], [5, 6]], "concatenate", Shares.contiguous(3, 2)) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="a rank returned 4 rows for a share of 2"):
        gather([[1, 2, 3, 4], [5, 6]], "concatenate", Shares(((0, 2), (1,))))


@pytest.mark.parametrize(
    ("results", "how", "error", "message"),
    [
        (
            [torch.zeros(1, 3), torch.zeros(1, 5)],
            "concatenate",
            ValueError,
            r"rows of shapes \[\(3,\), \(5,\)\]; pad them",
        ),
        ([[1], (2,)], "concatenate", ValueError, "different types: list and tuple"),
        ([{"a": [1]}, {"b": [1]}], "concatenate", ValueError, "different keys"),
        ([0.5, 0.25], "concatenate", TypeError, "the results is a float"),
        ([{"a": None}, {"a": None}], "mean", TypeError, "the results, key 'a', hold a NoneType"),
        ([torch.zeros(2), torch.zeros(1)], "mean", ValueError, "different shapes"),
        ([], "mean", ValueError, "no results"),
    ],
)
def test_results_that_do_not_fit_are_refused(
    results: list[Any], how: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        gather(results, how)


def test_dispatch_imports_neither_torch_nor_numpy_and_works_without() -> None:
    code = (
        "import sys; from rlite.data.dispatch import scatter, NeedParallel, gather\n"
        "calls = scatter((NeedParallel({'a': [1, 2, 3]}, balance_by=[1, 1, 2]),), {}, 2)\n"
        "print(calls, sorted({'torch', 'numpy', 'ray'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "[(({'a': [1, 2]},), {}), (({'a': [3]},), {})] []\n"


def test_rows_are_counted_in_every_container() -> None:
    assert {kind: num_rows(make([1, 2, 3])) for kind, make in CONTAINERS.items()} == dict.fromkeys(CONTAINERS, 3)
