"""The ids among which tokens were drawn: only trajectories whose sampling truncates have them."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.errors import DataError


def is_ragged_value(counts: Tensor, width: int) -> Tensor:
    """Return where a ragged key has values, `[n, width]`; the rest is padding.

    `counts`: number of values of each token, `[n, L]`.
    """
    return torch.arange(width) < counts.sum(-1, keepdim=True)


def check_kept_ids(trajectory: TensorDict, what: str) -> None:
    """Check that each token is among its kept ids, and that these are not negative."""
    counts, width = trajectory["kept_counts"].long(), trajectory["kept_ids"].shape[1]
    values = trajectory["kept_ids"][is_ragged_value(counts, width)]
    owners = torch.arange(counts.numel()).repeat_interleave(counts.flatten())
    tokens = trajectory["input_ids"].flatten()
    num_own = torch.zeros_like(tokens).index_add(0, owners, (values == tokens[owners]).long())
    if (wrong := ((counts.flatten() > 0) & (num_own != 1)).nonzero()[:, 0]).numel():
        row, position = divmod(int(wrong[0]), counts.shape[1])
        found = f"token {int(tokens[wrong[0]])} at position {position} of row {row} is not among its kept_ids"
        raise DataError(f"{what}: {found}, or occurs twice; expected the ids among which it was drawn")
    if (values < 0).any():
        raise DataError(f"{what}: kept_ids holds {int(values.min())}; expected token ids")
