"""Trajectories put together: the sequences of one episode, any trajectories as a batch, and batches as one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensordict import TensorDict

from rlite.data.packs import TokenHistory, check_trajectory, pad_checked, with_keys
from rlite.errors import DataError
from rlite.rollout.workflow import of_trajectory


def join_histories(histories: Sequence[TokenHistory], num_turns: int) -> TensorDict:
    """Return the sequences of one episode as the rows of one trajectory.

    Returns a TensorDict of batch size [k] with the keys of `rlite.rollout.workflow.trajectory`, `token_rewards` [k, L],
    `sequence_index` [k] from 0, `num_turns` [k], and `rewards` [k], the sum of the token rewards of all rows.
    """
    count = len(histories)
    rows = pad_trajectories([history.row(has_rewards=True) for history in histories]).exclude("group_ids")
    reward = math.fsum(reward for history in histories for reward in history.rewards)
    rows["sequence_index"] = torch.arange(count)
    rows["num_turns"] = torch.full((count,), num_turns)
    return rows.update(of_trajectory(count, rewards=reward))


def pad_trajectories(trajectories: Sequence[TensorDict], group_ids: Sequence[int] | None = None) -> TensorDict:
    """Pad trajectories of any lengths on the right, into one batch with the rows in order.

    Keys that are [k, L, ...] in every trajectory become [N, max L, ...], padded with 0 (`versions` with -1). Keys of
    equal shape beyond the rows are concatenated to [N, ...]. Ragged keys are padded to the widest row, and a trajectory
    without them has no values.

    Args:
        trajectories: at least one, all with the same keys.
        group_ids: one per trajectory, for all of its rows; default: its index.

    Returns:
        A TensorDict of batch size [N], with `group_ids` [N] int64.

    Raises:
        DataError: Keys are missing or too many, or shapes or types do not fit together. The message names the key and
            the trajectory.
    """
    if not trajectories:
        raise DataError("pad_trajectories: the list is empty; expected at least one trajectory")
    for index, trajectory in enumerate(trajectories):
        check_trajectory(trajectory, f"trajectory {index}")
    return pad_checked(trajectories, group_ids)


def join_batches(batches: Sequence[TensorDict]) -> TensorDict:
    """Return the rows of all batches as one batch, padded to one width. Rows keep their `group_ids`."""
    return with_keys(pad_trajectories(batches), group_ids=torch.cat([batch["group_ids"] for batch in batches]))
