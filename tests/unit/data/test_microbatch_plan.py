from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlite.errors import DataError
from rlite.runtime.parallel.microbatch_plan import Plan, first_fit_decreasing, plan_microbatches, sequence_flops

ORACLE = json.loads((Path(__file__).parents[2] / "oracles/07b_capacity_packing.json").read_text())

CAPACITY = 20
length_lists = st.lists(st.integers(0, CAPACITY), max_size=50)


def loads(plan: Plan, lengths: list[int]) -> list[list[int]]:
    return [[sum(lengths[row] for row in pack) for pack in share] for share in plan]


@pytest.mark.parametrize("case", ORACLE["cases"], ids=lambda case: case["id"])
def test_bins_are_as_few_as_those_of_the_widely_used_library(case: dict) -> None:
    lengths, params, expected = case["inputs"]["lengths"], case["params"], case["expected"]
    bins = first_fit_decreasing(lengths, params["capacity"])
    assert len(bins) <= expected["ffd_bins"]
    # The library's least number of bins and divisor are what data-parallel ranks ask for.
    num_ranks = max(params["groups_divisor"], params["min_groups"] if len(bins) < params["min_groups"] else 1)
    plan = plan_microbatches(lengths, num_ranks, params["capacity"])
    assert expected["lower_bound"] <= sum(len(share) for share in plan) <= expected["ffd_bins"]


@given(length_lists)
def test_first_fit_decreasing_is_first_fit_and_decreasing(lengths: list[int]) -> None:
    bins = first_fit_decreasing(lengths, CAPACITY)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(rows == sorted(rows) and rows for rows in bins)
    for later in range(1, len(bins)):
        longest = max(lengths[row] for row in bins[later])
        for earlier in bins[:later]:  # the row that opened a bin found no room in those before it
            assert sum(lengths[row] for row in earlier if lengths[row] >= longest) + longest > CAPACITY


@given(length_lists, st.integers(1, 9))
def test_a_plan_loses_nothing_repeats_nothing_and_keeps_ranks_in_step(lengths: list[int], num_ranks: int) -> None:
    plan = plan_microbatches(lengths, num_ranks, CAPACITY)
    assert len(plan) == num_ranks
    assert len({len(share) for share in plan}) == 1
    assert sorted(row for share in plan for pack in share for row in pack) == list(range(len(lengths)))
    assert all(load <= CAPACITY for share in loads(plan, lengths) for load in share)
    assert all(share == sorted(share, reverse=True) for share in loads(plan, lengths))
    assert len(plan[0]) <= max(1, -(-len(first_fit_decreasing(lengths, CAPACITY)) // num_ranks))
    assert bool(lengths) == bool(plan[0])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), max_size=40), st.integers(1, 5))
def test_rows_of_one_group_share_a_microbatch(rows: list[tuple[int, int]], num_ranks: int) -> None:
    counts: dict[int, int] = {}
    kept = []
    for length, key in rows:  # at most four rows in a group, so that each group fits
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= 4:
            kept.append((length, key))
    lengths, groups = [length for length, _ in kept], [key for _, key in kept]
    plan = plan_microbatches(lengths, num_ranks, CAPACITY, groups)
    packs = [pack for share in plan for pack in share]
    assert sorted(row for pack in packs for row in pack) == list(range(len(kept)))
    assert all(load <= CAPACITY for share in loads(plan, lengths) for load in share)
    for key in set(groups):
        assert sum(any(groups[row] == key for row in pack) for pack in packs) == 1


@pytest.mark.parametrize(("num_ranks", "capacity"), [(1, 8192), (8, 8192), (8, 16384), (64, 8192)])
def test_ten_thousand_log_normal_lengths_fill_their_packs(num_ranks: int, capacity: int) -> None:
    lengths = np.random.default_rng(1).lognormal(6.2, 0.9, size=10_000).clip(1, capacity).astype(int).tolist()
    started = time.process_time()
    plan = plan_microbatches(lengths, num_ranks, capacity)
    seconds = time.process_time() - started
    fill = sum(lengths) / (len(plan) * len(plan[0]) * capacity)
    per_rank = [sum(share) for share in loads(plan, lengths)]
    assert fill >= 0.97 or len(plan[0]) == -(-sum(lengths) // (num_ranks * capacity)), fill
    assert max(per_rank) - min(per_rank) <= 0.001 * max(per_rank)
    assert seconds < 10  # it takes one; a plan that compares all pairs of rows would take minutes


def test_microbatches_that_run_together_are_of_like_size() -> None:
    lengths = np.random.default_rng(2).lognormal(6.2, 0.9, size=2_000).clip(1, 8192).astype(int).tolist()
    per_step = zip(*loads(plan_microbatches(lengths, 4, 8192), lengths), strict=True)
    waits = sum(max(step) * len(step) - sum(step) for step in per_step)
    assert waits <= 0.02 * sum(lengths)


def test_ranks_are_a_little_uneven_where_that_saves_a_microbatch() -> None:
    # Rows dealt for balance alone leave a share of more than 20 tokens, and so a second microbatch on every rank.
    plan = plan_microbatches([5, 8, 10, 5, 11, 19], 3, 20)
    assert [len(share) for share in plan] == [1, 1, 1]


def test_fewer_rows_than_ranks_leave_empty_microbatches() -> None:
    assert plan_microbatches([5, 5], 4, 8) == [[[0]], [[1]], [[]], [[]]]


def test_no_rows_need_no_microbatch() -> None:
    assert plan_microbatches([], 3, 8) == [[], [], []]


def test_a_row_that_is_too_long_is_named_with_its_length_and_the_capacity() -> None:
    for pack in (lambda: plan_microbatches([3, 9], 2, 8), lambda: first_fit_decreasing([3, 9], 8)):
        with pytest.raises(DataError, match=r"row 1 has 9 tokens, and a microbatch holds at most 8"):
            pack()


def test_a_group_that_is_too_long_is_named_with_its_rows() -> None:
    with pytest.raises(DataError, match=r"group 'b' \(rows 1, 2\) has 10 tokens.* at most 8"):
        plan_microbatches([1, 5, 5], 1, 8, groups=["a", "b", "b"])


ROWS = st.lists(st.tuples(st.integers(0, 10), st.booleans(), st.floats(0, 1e3)), max_size=40)


@given(ROWS, st.integers(1, 6), st.sampled_from(["first_fit_decreasing", "karmarkar_karp"]))
def test_any_costs_groups_and_methods_lose_nothing_and_keep_the_limits(
    rows: list[tuple[int, bool, float]], num_ranks: int, method: Any
) -> None:
    lengths, costs = [row[0] for row in rows], [row[2] for row in rows]
    groups = [number // 2 if is_paired else -1 - number for number, (_, is_paired, _) in enumerate(rows)]
    plan = plan_microbatches(lengths, num_ranks, CAPACITY, groups, costs=costs, method=method)
    packs = [pack for share in plan for pack in share]
    assert sorted(row for pack in packs for row in pack) == list(range(len(rows)))
    assert len(plan) == num_ranks
    assert len({len(share) for share in plan}) == 1
    assert all(load <= CAPACITY for share in loads(plan, lengths) for load in share)
    assert all(sum(any(groups[row] == key for row in pack) for pack in packs) == 1 for key in set(groups))
    by_tokens = plan_microbatches(lengths, num_ranks, CAPACITY, groups, costs=costs)
    assert len(plan[0]) == len(by_tokens[0])  # an even plan needs no more microbatches


def test_ranks_are_balanced_by_cost_and_capacity_is_kept_in_tokens() -> None:
    lengths = np.random.default_rng(3).lognormal(6.2, 0.9, size=2_000).clip(1, 8192).astype(int).tolist()
    costs = [sequence_flops(length, 1024, 28) for length in lengths]

    def waiting(plan: Plan) -> float:
        spent = np.array([[sum(costs[row] for row in pack) for pack in share] for share in plan])
        return float(spent.max(0).sum() * len(plan) / spent.sum() - 1)

    by_cost, by_tokens = (plan_microbatches(lengths, 8, 8192, costs=given) for given in (costs, None))
    assert all(load <= 8192 for share in loads(by_cost, lengths) for load in share)
    assert waiting(by_cost) < 0.03 < waiting(by_tokens)


def test_karmarkar_karp_makes_the_microbatches_of_a_rank_alike() -> None:
    lengths = [7, 6, 5, 4, 3, 2, 1]
    full = loads(plan_microbatches(lengths, 1, 18), lengths)
    even = loads(plan_microbatches(lengths, 1, 18, method="karmarkar_karp"), lengths)
    assert full == [[18, 10]]
    assert even == [[14, 14]]


def test_flops_are_linear_in_short_sequences_and_quadratic_in_long_ones() -> None:
    assert sequence_flops(1, 4, 3) == 3 * (24 * 16 + 2 * 4)
    assert sequence_flops(2, 1024, 28) / sequence_flops(1, 1024, 28) == pytest.approx(2, rel=1e-3)
    assert sequence_flops(2 << 30, 1024, 28) / sequence_flops(1 << 30, 1024, 28) == pytest.approx(4, rel=1e-3)


def test_costs_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(DataError, match="weight nan"):
        plan_microbatches([1, 1], 1, 8, costs=[1.0, float("nan")])
