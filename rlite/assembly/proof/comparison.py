"""Comparison of recorded values with values that were computed again."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


def compare(
    name: str, kept: Tensor, again: Tensor, places: Sequence[str] = (), relative: float = RELATIVE
) -> Comparison:
    """Return how two tensors compare; two NaNs are equal.

    Args:
        name: name of the quantity.
        kept: what the run has kept.
        again: what was computed again; another shape differs.
        places: a name for each entry of the first dimension.
        relative: bound of the difference, relative to the kept value.
    """
    if kept.shape != again.shape:
        found = f"{list(kept.shape)} and {list(again.shape)}"
        return Comparison(name, kept.numel(), math.nan, False, False, where=f"the shapes are {found}")
    one, other = kept.double().flatten(), again.double().flatten()
    is_equal = (one == other) | (one.isnan() & other.isnan())
    away = torch.where(is_equal, 0.0, (one - other).abs())
    is_near = is_equal | (away <= ABSOLUTE + relative * one.abs())
    worst = int(away.nan_to_num(nan=math.inf).argmax()) if len(away) else 0
    where = ""
    if len(away) and not is_equal.all():
        index = [int(each) for each in torch.unravel_index(torch.tensor(worst), kept.shape)]
        where = ", ".join([places[index[0]], *map(str, index[1:])]) if places and index else str(index)
    kept_value, value = (one.item(), other.item()) if one.numel() == 1 else (None, None)
    difference = away[worst].item() if len(away) else 0.0
    verdict = bool(is_equal.all()), bool(is_near.all())
    return Comparison(name, len(away), difference, *verdict, kept=kept_value, again=value, where=where)


def compare_metrics(
    logged: Mapping[str, float], again: Mapping[str, float], is_own_layout: bool, is_complete: bool
) -> list[Comparison]:
    """Return how the metrics of a step compare that do not depend on the machine.

    Args:
        logged: the line of metrics.jsonl.
        again: the metrics that were computed again.
        is_own_layout: the devices are divided as they were.
        is_complete: everything that was generated was trained on; else the means of rollouts cover more.
    """
    left_out = OF_MACHINES if is_own_layout else (*OF_MACHINES, *OF_LAYOUTS)
    left_out = left_out if is_complete else (*left_out, *OF_GENERATION)
    rollouts = () if is_complete else OF_ROLLOUTS
    names = [name for name in again if name in logged and not name.startswith((*left_out, *rollouts))]
    return [compare_numbers(name, logged[name], again[name]) for name in sorted(names)]


def compare_numbers(name: str, kept: float, again: float) -> Comparison:
    """Return how two numbers compare.

    Args:
        name: name of the quantity.
        kept: the number that the run has kept.
        again: the number that was computed again.
    """
    return compare(name, torch.tensor([kept], dtype=torch.float64), torch.tensor([again], dtype=torch.float64))


OF_ROLLOUTS = ("reward", "score", "response_length", "truncated", "uniform_groups", "turns", "tool_")
"""beginnings of the names of metrics over all rollouts of a step, also of those that were not trained on"""


def checkpoint_tensors(path: Path) -> dict[str, Tensor]:
    """Return the whole tensors of a checkpoint: weights, and the optimizer's state.

    Args:
        path: a folder `step-N`, or that of another engine beside it.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
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


def compare_checkpoints(kept: Path, again: Path) -> list[Comparison]:
    """Return how weights and optimizer's state of two checkpoints compare, as two quantities."""
    one, other = checkpoint_tensors(kept), checkpoint_tensors(again)
    return [
        _joined(part, one, other, [name for name in one if name.startswith(part)])
        for part in ("model", "optimizer")
        if any(name.startswith(part) for name in one)
    ]


def _joined(part: str, kept: Mapping[str, Tensor], again: Mapping[str, Tensor], names: Iterable[str]) -> Comparison:
    found = [
        compare(name, kept[name], again[name])
        if name in again
        else Comparison(name, 0, math.nan, False, False, where="it is missing")
        for name in names
    ]
    worst = max(found, key=lambda each: math.inf if math.isnan(each.difference) else each.difference)
    name = {"model": "weights", "optimizer": "optimizer state"}[part]
    is_equal, is_near = all(each.is_equal for each in found), all(each.is_near for each in found)
    place = "" if is_equal else f"{worst.name} {worst.where}"
    return Comparison(name, sum(each.count for each in found), worst.difference, is_equal, is_near, where=place)
