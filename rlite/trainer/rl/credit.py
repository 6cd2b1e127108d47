"""Advantages of episodes with several branches or seats: baselines per seat, and credit per branch."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.algorithms import CREDITS, Branch
from rlite.data.packs import check_has, first_rows, trajectory_index, with_keys
from rlite.errors import ConfigError
from rlite.trainer.rl.objective import compute_advantages
from rlite.trainer.rl.options import EPISODE, OWN, AdvantageOptions


def credited_advantages(batch: TensorDict, *, adv: AdvantageOptions, num_seats: int = 1, **given: Any) -> TensorDict:
    """Return a batch with `advantages` [N, L], and for gae `returns` [N, L]; see `compute_advantages`."""
    source = batch
    if num_seats > 1:
        check_has(batch, "seat_ids")
        groups = torch.zeros_like(batch["group_ids"]) if given.pop("is_single") else batch["group_ids"]
        source, given["is_single"] = with_keys(batch, group_ids=groups * num_seats + batch["seat_ids"]), False
    if adv.credit == OWN:
        source = with_own_rewards(source)
    made = compute_advantages(source, adv, **given)
    columns = {name: made[name] for name in ("advantages", "returns") if name in made}
    if adv.credit not in (EPISODE, OWN):
        columns["advantages"] = columns["advantages"] * credits_of(made, adv.credit)[:, None]
    return with_keys(batch, **columns)


def with_own_rewards(batch: TensorDict) -> TensorDict:
    """Return a batch in which each row is a trajectory, with the rewards of its own turns if it has some."""
    own = {"rewards": batch["token_rewards"].sum(1)} if "token_rewards" in batch else {}
    return with_keys(batch, sequence_index=torch.zeros(len(batch), dtype=torch.int64), **own)


def credits_of(batch: TensorDict, rule: str) -> Tensor:
    """Return the factor of the advantage of each row [N]."""
    counts, index = batch["loss_mask"].sum(1), trajectory_index(batch)
    rewards = batch["token_rewards"].sum(1) if "token_rewards" in batch else batch["rewards"]
    advantages = batch["advantages"].sum(1) / counts.clamp(min=1)
    columns = zip(counts.tolist(), rewards.tolist(), advantages.tolist(), strict=True)
    rows = [Branch(*each) for each in columns]
    starts = [*first_rows(batch).tolist(), len(index)]
    factors: list[float] = []
    for start, end in pairwise(starts):
        own = [float(factor) for factor in CREDITS[rule](rows[start:end])]
        if len(own) != end - start or not all(map(math.isfinite, own)):
            expected = f"expected a finite number for each of {end - start} branches"
            raise ConfigError(f"adv.credit={rule} returned {own!r:.200}; {expected}")
        factors += own
    return torch.tensor(factors)
