"""The score of an evaluated trajectory, and further fields of its sample."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict

from rlite.batch import check_one_per_row
from rlite.errors import DataError


def score_column(trajectory: TensorDict) -> str:
    """Return the key of a trajectory's score: `scores`, or `rewards` if the workflow gives no scores.

    Raises:
        DataError: `scores` or `rewards` is missing, or not [N].
    """
    key = "scores" if "scores" in trajectory else "rewards"
    if key not in trajectory:
        raise DataError("an evaluated trajectory has neither scores nor rewards; expected one of them")
    check_one_per_row(trajectory, key)
    return key


def measured(trajectory: TensorDict) -> dict[str, Any]:
    """Return the score of a trajectory, whether it is truncated, and its length, as fields of a `Sample`.

    Raises:
        DataError: `scores` or `rewards` is missing, or not [N].
    """
    return {
        "score": float(trajectory[score_column(trajectory)][0]),
        "truncated": "truncated" in trajectory and bool(trajectory["truncated"].any()),
        "length": int(trajectory["loss_mask"].sum()) if "loss_mask" in trajectory else 0,
    }
