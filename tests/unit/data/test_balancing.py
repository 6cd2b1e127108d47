from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlite.errors import DataError
from rlite.runtime.parallel.balancing import balanced_partitions, karmarkar_karp

ORACLE = json.loads((Path(__file__).parents[2] / "oracles/07a_length_balanced_partitions.json").read_text())

weight_lists = st.lists(st.integers(0, 50), max_size=60)
part_counts = st.integers(1, 12)


@pytest.mark.parametrize("case", ORACLE["cases"], ids=lambda case: case["id"])
def test_partitions_are_at_least_as_balanced_as_the_widely_used_library(case: dict) -> None:
    lengths, params = case["inputs"]["lengths"], case["params"]
    parts = karmarkar_karp(lengths, params["k"], params["equal_size"])
    sums = [sum(lengths[row] for row in part) for part in parts]
    assert case["expected"]["mean_lower_bound_ceil"] <= max(sums) <= case["expected"]["max_sum"]
    assert max(sums) - min(sums) <= case["expected"]["spread"]


@given(weight_lists, part_counts, st.booleans())
def test_every_row_is_in_exactly_one_part_and_no_part_is_empty_without_need(
    weights: list[int], num_parts: int, equal_size: bool
) -> None:
    parts = karmarkar_karp(weights, num_parts, equal_size)
    assert len(parts) == num_parts
    assert sorted(row for part in parts for row in part) == list(range(len(weights)))
    assert all(part == sorted(part) for part in parts)
    assert sum(bool(part) for part in parts) == min(num_parts, len(weights))
    if equal_size:
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


@given(weight_lists, part_counts)
def test_the_heaviest_part_exceeds_the_mean_by_no_more_than_one_row(weights: list[int], num_parts: int) -> None:
    heaviest = max(sum(weights[row] for row in part) for part in balanced_partitions(weights, num_parts))
    assert heaviest <= sum(weights) / num_parts + max(weights, default=0)


def test_the_differencing_method_solves_the_textbook_example() -> None:
    # {8, 7, 6, 5, 4}: 8-7=1, 6-5=1, 4-1=3, 3-1=2, so the sums differ by 2. By hand: {8, 6} and {7, 5, 4}.
    assert karmarkar_karp([8, 7, 6, 5, 4], 2) == [[0, 2], [1, 3, 4]]


def test_the_answer_depends_on_nothing_but_the_input() -> None:
    weights = np.random.default_rng(0).integers(1, 8, size=200)
    assert balanced_partitions(weights, 7) == balanced_partitions(weights.tolist(), 7)
    assert balanced_partitions(weights.astype(np.uint8), 7) == balanced_partitions(weights.tolist(), 7)


@pytest.mark.parametrize(("num_parts", "tolerance"), [(2, 1e-5), (8, 1e-4), (512, 0.02)])
def test_ten_thousand_log_normal_lengths_come_out_even(num_parts: int, tolerance: float) -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, size=10_000).astype(int).tolist()
    sums = [sum(lengths[row] for row in part) for part in balanced_partitions(lengths, num_parts)]
    assert max(sums) - min(sums) <= tolerance * sum(lengths) / num_parts


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf])
def test_a_weight_that_makes_no_sense_is_named(weight: float) -> None:
    with pytest.raises(DataError, match="row 1 has weight"):
        balanced_partitions([1, weight], 2)


def test_balancing_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, rlite.runtime.parallel.balancing; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
