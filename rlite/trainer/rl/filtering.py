"""Dynamic filtering (DAPO, arXiv:2503.14476): groups of equal rewards teach nothing and are replaced."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.data.packs import check_one_per_row, first_rows, layout
from rlite.observability import stats_tracker
from rlite.rollout.joined import join_batches


def replace_uniform_groups(
    batch: TensorDict, num_groups: int, generate: Callable[[int], TensorDict | None], max_rounds: int
) -> TensorDict:
    """Return a batch in which the rewards of each group differ, as far as such groups are found.

    Uniform groups, whose trajectories all have the same reward, are replaced, and so are lost groups. If some are still
    missing at the end, uniform groups fill the batch up.

    `generate`: returns so many new groups, or None if all of them were lost.
    """
    kept, uniform, num_missing, num_dropped, rounds = [], [], num_groups, 0, 0
    found: TensorDict | None = batch
    while True:
        if found is not None and layout(found) == layout(batch):  # others cannot be joined
            is_varied = torch.isin(found["group_ids"], varied_groups(found))
            num_varied = len(found["group_ids"][is_varied].unique())
            kept.append(found[is_varied])
            uniform.append(found[~is_varied])
            num_missing -= num_varied
            num_dropped += len(found["group_ids"].unique()) - num_varied
        elif found is not None:
            num_odd = len(found["group_ids"].unique())
            stats_tracker.count(**{"rollout/num_lost": num_odd, "rollout/lost/unlike_the_first_batch": num_odd})
        if num_missing <= 0 or rounds == max_rounds:
            break
        found, rounds = generate(num_missing), rounds + 1
    if num_missing > 0 and num_dropped:
        spare = join_batches([part for part in uniform if len(part)])
        ids = list(dict.fromkeys(spare["group_ids"].tolist()))[:num_missing]
        kept.append(spare[torch.isin(spare["group_ids"], torch.tensor(ids))])
        num_dropped -= len(ids)
    stats_tracker.scalar(num_filtered=num_dropped, num_refills=rounds)
    return join_batches([part for part in kept if len(part)])


def varied_groups(batch: TensorDict) -> Tensor:
    """Return the ids of the groups whose trajectories have different rewards."""
    first = batch[first_rows(batch)]
    groups = first["group_ids"]
    found = [int(group) for group in groups.unique() if is_varied(first[groups == group])]
    return torch.tensor(found, dtype=torch.int64)


def is_varied(trajectories: TensorDict) -> bool:
    """Return whether the rewards of a group differ, in one of its seats if it has several."""
    rewards = trajectories["rewards"]
    if "seat_ids" not in trajectories:
        return len(rewards.unique()) > 1
    seats = trajectories["seat_ids"]
    return any(len(rewards[seats == seat].unique()) > 1 for seat in seats.unique())


def num_uniform(batch: TensorDict) -> int:
    """Return the number of groups whose trajectories all have the same reward."""
    return len(batch["group_ids"].unique()) - len(varied_groups(batch))


class VariedGroups:
    """Accepts groups with different rewards, and every group once the budget of one batch is spent.

    `refused`: takes each refused group. Called in the collector's thread.
    """

    def __init__(self, budget: int, refused: Callable[[TensorDict], None]) -> None:
        self._budget, self._refused = budget, refused
        self._num_refused = self._num_before = 0  # the first is written by the collector's thread alone

    def __call__(self, group: TensorDict) -> bool:
        """Return whether the group is accepted."""
        check_one_per_row(group, "rewards")
        if is_varied(group[first_rows(group)]) or self._num_refused - self._num_before >= self._budget:
            return True
        self._num_refused += 1
        self._refused(group)
        return False

    def next_batch(self) -> int:
        """Return the number of refused groups, and begin with a new budget."""
        refused = self._num_refused - self._num_before
        self._num_before += refused
        return refused
