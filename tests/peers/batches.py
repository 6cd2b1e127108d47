"""Random batches for comparisons: padded [B, L] as the other libraries have them, float64, every row with an action."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NUM_GROUPS, GROUP_SIZE, LENGTH = 4, 4, 13


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rewards, policies and groups of 16 responses. Groups are contiguous, as some libraries want them."""

    mask: Tensor
    rewards: Tensor
    """per token, on every token"""
    values: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    group_ids: Tensor

    @property
    def scores(self) -> Tensor:
        return self.rewards.sum(-1)

    @property
    def index(self) -> np.ndarray:
        return self.group_ids.numpy()

    @property
    def policies(self) -> tuple[Tensor, Tensor]:
        """The policy that is trained and the one that sampled."""
        return self.logprobs, self.old_logprobs


def random_batch(seed: int, *, has_holes: bool = True, spread: float = 0.3) -> Batch:
    """Responses of 1 to 13 tokens; `has_holes`: with tokens of the environment between actions. Rewards are small
    whole numbers, so that ties occur; `spread` is the standard deviation between the log-probabilities of policies."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_GROUPS * GROUP_SIZE, LENGTH)

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, LENGTH + 1, shape[:1], generator=generator)
    mask = torch.arange(LENGTH) < lengths[:, None]
    if has_holes:
        is_hole = torch.rand(shape, generator=generator) < 0.25
        is_hole[:, 0] = False
        mask = mask & ~is_hole
    rewards = torch.zeros(shape, dtype=torch.float64)
    rewards[:, 0] = torch.randint(-1, 3, shape[:1], generator=generator).double()
    old = -normal().abs() - 0.01
    return Batch(
        mask=mask.double(),
        rewards=rewards,
        values=normal(),
        logprobs=old + normal(spread),
        old_logprobs=old,
        ref_logprobs=old + normal(spread),
        group_ids=torch.arange(NUM_GROUPS).repeat_interleave(GROUP_SIZE),
    )
