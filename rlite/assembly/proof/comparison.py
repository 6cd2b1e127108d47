"""Comparison of recorded values with values that were computed again."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as contents

from rlite.errors import CheckpointError
from rlite.runtime.storage.sharded import JsonReader, PlainLoadPlanner, naming

RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""largest difference of two computations of one number in float32, in another layout or on another machine"""
OF_MACHINES = ("seconds", "tokens_per_second", "memory", "mfu", "sync_", "rollout/", "failed_attempts")
"""beginnings of the names of metrics that say how fast or where a step was made"""
OF_LAYOUTS = ("num_microbatches", "shared_tokens")
"""metrics that depend on the division of a batch"""
OF_GENERATION = ("num_filtered", "num_refills", "num_unreplaced", "num_lost", "num_refused", "routing_recorded")
"""metrics of what was generated and not trained on, or of how"""
OF_ROLLOUTS = ("reward", "score", "response_length", "truncated", "uniform_groups", "turns", "turn_limited", "tool_")
"""beginnings of the names of metrics over all rollouts of a step, also of those that were not trained on"""


@dataclass(frozen=True)
class Comparison:
    """One quantity of a step, as it is kept and as it was computed again."""

    name: str
    count: int
    """compared numbers"""
    difference: float
    """largest absolute difference; NaN if only one of two is a number"""
    is_equal: bool
    """every bit is equal"""
    is_near: bool
    """every number is within the bounds"""
    kept: float | None = None
    """the kept value of a single number"""
    again: float | None = None
    """the computed value of a single number"""
    where: str = ""
    """place of the largest difference"""

    @property
    def verdict(self) -> str:
        """Return how the two compare, in a word or two."""
        return "equal" if self.is_equal else "within bounds" if self.is_near else "differs"

    def __str__(self) -> str:
        """Return the two values, or how many there are, and how they compare."""
        values = f"{self.count:,} numbers" if self.kept is None else f"{self.kept:.9g} kept, {self.again:.9g} now"
        away = "" if self.is_equal else f", by at most {self.difference:.3g} at {self.where}"
        return f"{values}; {self.verdict}{away}"


def worst_of(comparisons: Iterable[Comparison]) -> Comparison:
    """Return the comparison with the worst verdict, and among these with the largest difference."""

    def badness(each: Comparison) -> tuple[bool, bool, float]:
        return not each.is_near, not each.is_equal, math.inf if math.isnan(each.difference) else each.difference

    return max(comparisons, key=badness)


def compare(name: str, kept: Tensor, again: Tensor) -> Comparison:
    """Return how two tensors compare; two NaNs are equal.

    `again`: what was computed again; another shape differs.
    """
    if kept.shape != again.shape:
        found = f"{list(kept.shape)} and {list(again.shape)}"
        return Comparison(name, kept.numel(), math.nan, False, False, where=f"the shapes are {found}")
    one, other = kept.double().flatten(), again.double().flatten()
    is_equal = (one == other) | (one.isnan() & other.isnan())
    away = torch.where(is_equal, 0.0, (one - other).abs())
    is_near = is_equal | (away <= ABSOLUTE + RELATIVE * one.abs())
    worst = int(away.nan_to_num(nan=math.inf).argmax()) if len(away) else 0
    where = ""
    if len(away) and not is_equal.all():
        where = str([int(each) for each in torch.unravel_index(torch.tensor(worst), kept.shape)])
    kept_value, value = (one.item(), other.item()) if one.numel() == 1 else (None, None)
    difference = away[worst].item() if len(away) else 0.0
    verdict = bool(is_equal.all()), bool(is_near.all())
    return Comparison(name, len(away), difference, *verdict, kept=kept_value, again=value, where=where)


def compare_rows(name: str, kept: Tensor, again: Tensor) -> Comparison:
    """Return how values of the rows of a batch, or of their tokens, compare.

    `kept`: values that the run has kept, [N, ...]; NaN is unknown.
    """
    if kept.shape == again.shape:
        again = torch.where(kept.isnan(), kept, again.to(kept.dtype))
    return compare(f"{name} of {'tokens' if kept.dim() > 1 else 'rows'}", kept, again)


def compare_numbers(name: str, kept: float, again: float) -> Comparison:
    """Return how two numbers compare."""
    return compare(name, torch.tensor([kept], dtype=torch.float64), torch.tensor([again], dtype=torch.float64))


def compare_metrics(
    logged: Mapping[str, float], again: Mapping[str, float], is_own_layout: bool, is_complete: bool, is_exact: bool
) -> list[Comparison]:
    """Return how the metrics of a step compare that do not depend on the machine.

    `is_complete`: everything that was generated was trained on; else the means of rollouts cover more.
    """
    layouts, rollouts = () if is_own_layout else OF_LAYOUTS, () if is_complete else (*OF_GENERATION, *OF_ROLLOUTS)
    left_out = (*OF_MACHINES, *layouts, *rollouts)
    names = [name for name in again if (is_exact or name in logged) and not name.startswith(left_out)]
    return [compare_numbers(name, logged.get(name, math.nan), again[name]) for name in sorted(names)]


def checkpoint_tensors(path: Path) -> dict[str, Tensor]:
    """Return the whole tensors of a checkpoint: weights, and the optimizer's state."""
    reader = JsonReader(path)
    if not os.path.isfile(path / "metadata.json"):
        raise CheckpointError(f"{path}: it has no metadata.json")
    with naming(path / "metadata.json"):
        entries = reader.read_metadata().state_dict_metadata
        tensors: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, contents.TensorStorageMetadata)
        }
    try:
        with warnings.catch_warnings():  # of what is intended: one process reads
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(tensors, storage_reader=reader, planner=PlainLoadPlanner(), no_dist=True)
    except dcp.api.CheckpointException as error:
        raise CheckpointError(f"{path}: its tensors cannot be read: {error}") from None
    return tensors


PARTS = {"model": "weights", "optimizer": "optimizer state"}
"""parts of a checkpoint, by the beginnings of the names of their tensors"""


def compare_checkpoints(kept: Path, again: Path, prefix: str = "") -> list[Comparison]:
    """Return how weights and optimizer's state of two checkpoints compare, as one quantity each."""
    one, other = checkpoint_tensors(kept), checkpoint_tensors(again)
    missing = torch.empty(0)
    compared = []
    for part, name in PARTS.items():
        names = [key for key in {**one, **other} if key.startswith(part)]
        if found := [compare(key, one.get(key, missing), other.get(key, missing)) for key in names]:
            worst = worst_of(found)
            where, count = f"{worst.name} {worst.where}", sum(each.count for each in found)
            compared.append(replace(worst, name=prefix + name, count=count, kept=None, again=None, where=where))
    return compared
