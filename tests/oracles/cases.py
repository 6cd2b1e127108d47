"""The numbers of other libraries as test cases; see README.md for the format.

A test module holds adapters by file: each takes one case and returns our outputs under the oracle's names. Everything
that knows a layout is computed padded and packed.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rlite.algorithms import aggregate, to_tokens

HERE = Path(__file__).parent
DEFAULT_TOLERANCE = {"float64": {"rtol": 1e-9, "atol": 1e-11}, "float32": {"rtol": 1e-5, "atol": 1e-6}}
METRICS = ("*fraction", "approx_kl")


class Case:
    """One case in one layout. Attributes are its inputs as float64 tensors of the batch's shape or packed."""

    def __init__(self, raw: dict[str, Any], packed: bool) -> None:
        self.params = raw["params"]
        self.inputs = {}
        self.rows, self.cu_seqlens, self.shape = None, None, None
        shape = torch.tensor(raw["inputs"].get("mask", [])).shape
        if packed and len(shape) == 2:
            self.shape = shape
            self.cu_seqlens = torch.arange(0, shape[0] * shape[1] + 1, shape[1])
        for name, value in raw["inputs"].items():
            integral = name in ("group_ids", "labels")
            tensor = torch.tensor(value, dtype=torch.long if integral else torch.float64)
            if self.shape is not None and tensor.shape[:2] == self.shape:
                tensor = tensor.flatten(0, 1)
            self.inputs[name] = tensor
        if "scores" in self.inputs:  # `scores` is a method
            self.inputs["scores_input"] = self.inputs.pop("scores")

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.inputs[name]
        except KeyError as error:
            raise AttributeError(name) from error

    @property
    def layout(self) -> dict[str, Tensor | None]:
        return {"cu_seqlens": self.cu_seqlens}

    def leaf(self, name: str) -> Tensor:
        self.inputs[name].requires_grad_()
        return self.inputs[name]

    def scores(self, name: str = "token_rewards") -> Tensor:
        rewards = self.inputs[name]
        return rewards.view(self.shape or rewards.shape).sum(-1)

    def spread(self, values: Tensor) -> Tensor:
        return to_tokens(values, self.mask, **self.layout)


def aggregated(case: Case, loss: Tensor, name: str | None = None, **counts: Any) -> Tensor:
    """The oracle's five aggregations in terms of our three."""
    name = name or case.params["aggregation"]
    width = case.shape[1] if case.shape else loss.shape[-1]
    tokens, sequences = counts.get("num_tokens"), counts.get("num_sequences")
    how = {
        "token-mean": lambda: aggregate(loss, case.mask, "token", num_tokens=tokens, **case.layout),
        "token-sum": lambda: aggregate(loss, case.mask, "token", num_tokens=1, **case.layout),
        "seq-mean-token-mean": lambda: aggregate(loss, case.mask, "sequence", num_sequences=sequences, **case.layout),
        "seq-mean-token-sum": lambda: aggregate(
            loss, case.mask, "constant", num_sequences=sequences, length=1, **case.layout
        ),
        "seq-mean-token-sum-norm": lambda: aggregate(
            loss, case.mask, "constant", num_sequences=sequences, length=counts.get("length") or width, **case.layout
        ),
    }
    return how[name]()


def grad(scalar: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(scalar, leaf, retain_graph=True)[0]


Adapter = Callable[[Case], dict[str, Tensor]]


class Comparison(NamedTuple):
    """One case of a file in one layout."""

    adapter: Adapter
    oracle: dict[str, Any]
    raw: dict[str, Any]
    is_packed: bool
    not_ours: Collection[str]
    """patterns of outputs that belong to functions which we do not have"""

    def check(self) -> None:
        """Compare our outputs with the oracle's."""
        case = Case(self.raw, self.is_packed)
        outputs = self.adapter(case)
        ours = [name for name in self.raw["expected"] if not matches(name, self.not_ours)]
        assert ours
        for name in ours:
            expected = torch.tensor(self.raw["expected"][name], dtype=torch.float64)
            found = outputs[name].detach().double().reshape(expected.shape)
            where = (self.oracle.get("compare") or {}).get(name, "all")
            if where.startswith("where:"):
                kept = case.inputs[where.removeprefix("where:")].view(expected.shape).bool()
                expected, found = expected[kept], found[kept]
            rule = tolerance_of(self.oracle, self.raw["dtype"], name)
            torch.testing.assert_close(found, expected, **rule, msg=f"{name}: found {found}, expected {expected}")


def comparisons(adapters: Mapping[str, Adapter], not_ours: Mapping[str, Collection[str]] | None = None) -> list[Any]:
    """Every case of the files that have an adapter, for parametrize; with a mask both padded and packed."""
    found = []
    for name, adapter in adapters.items():
        oracle = json.loads((HERE / f"{name}.json").read_text())
        for raw in oracle["cases"]:
            for layout in ("padded", "packed") if "mask" in raw["inputs"] else ("padded",):
                comparison = Comparison(adapter, oracle, raw, layout == "packed", (not_ours or {}).get(name, ()))
                found.append(pytest.param(comparison, id=f"{raw['id']}-{layout}"))
    return found


def matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def tolerance_of(oracle: dict[str, Any], dtype: str, output: str) -> dict[str, float]:
    for names, rule in oracle["tolerance"].items():
        if matches(output, [pattern.strip() for pattern in names.split(",")]):
            return rule
    if matches(output, METRICS):
        return {"rtol": 1e-6, "atol": 1e-6}
    return oracle["tolerance"].get(dtype, DEFAULT_TOLERANCE.get(dtype, {"rtol": 0.0, "atol": 0.0}))
