"""The Triton kernels of the output embedding: interpreted against float64, and compiled ahead of time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
MAX_SHARED = 227 << 10
"""bytes of shared memory that a block may have on H100"""


def output_of(what: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.unit.backends.models.triton_head_program", what]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    return output_of("interpret", TRITON_INTERPRET="1")


def test_values_and_gradients_of_a_divided_vocabulary_are_those_of_float64(interpreted: dict[str, Any]) -> None:
    for case, errors in interpreted["cases"].items():
        assert errors["logprobs"] < 1e-5, case
        assert errors["entropies"] < 1e-5, case
        assert errors["gradient"] < (5e-3 if case.startswith("bfloat16") else 1e-5), case


def test_forbidden_tokens_have_no_share_and_nan_is_handed_on(interpreted: dict[str, Any]) -> None:
    found = interpreted["infinities"]
    assert all(found["is_alike"])
    assert found["is_nan"] == found["has_nan_gradient"] == [False, True, True, True, False]
    assert found["forbidden"] == 0


def test_the_head_has_the_gradients_of_float64_with_kept_blocks_and_kept_ids(interpreted: dict[str, Any]) -> None:
    for case, errors in interpreted["heads"].items():
        assert max(errors.values()) < 1e-5, (case, errors)


@pytest.mark.slow
def test_compiled_kernels_spill_nothing_and_read_and_write_vectors() -> None:
    for kernel, facts in output_of("compile").items():
        assert facts["target"] == {"80": "sm_80", "90": "sm_90a", "100": "sm_100a"}[kernel.split()[-1]]
        assert facts["STACK"] == facts["LOCAL"] == 0, kernel
        assert facts["shared"] < MAX_SHARED, kernel
        assert facts["loads"] >= 1, kernel
        assert facts["stores"] >= 1 or kernel.startswith("statistics"), kernel
