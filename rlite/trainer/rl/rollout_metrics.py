"""Metrics of everything that a step has generated, including trajectories that a filter has dropped."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.batch import NAMED_REWARD
from rlite.rollout.trajectories import first_rows, trajectory_index

SAID_ONCE = {"scores": "score", "num_turns": "turns", "num_tool_calls": "tool_calls", "num_tool_errors": "tool_errors"}
"""keys of a whole trajectory that workflows may write, each with the metric that its mean is"""
PERCENTILES = {"p50": 0.5, "p95": 0.95}


class Generated:
    """Gathers the trajectories of one step from each batch that was generated for it."""

    def __init__(self) -> None:
        self._parts: list[dict[str, Tensor]] = []

    def add(self, batch: TensorDict, is_one_group: bool = False) -> None:
        """Count every trajectory of a batch, by `group_ids` or all of them as one group. Safe in any thread."""
        first, index = first_rows(batch), trajectory_index(batch)
        zeros, rewards = torch.zeros(len(first)), _rewards(batch)
        groups = torch.zeros(len(first), dtype=torch.int64) if is_one_group else batch["group_ids"][first]
        part = {
            "reward": rewards,
            "response_length": zeros.index_add(0, index, batch["loss_mask"].sum(-1).float()),
            "uniform_groups": _are_uniform(rewards, groups),
        }
        # a user's workflow may leave these out
        if "truncated" in batch:
            part["truncated"] = zeros.index_add(0, index, batch["truncated"].float()) > 0
        names = {name: name for name in map(str, batch.keys()) if name.startswith(NAMED_REWARD)}
        part |= {name: batch[key][first] for key, name in (SAID_ONCE | names).items() if key in batch}
        self._parts.append(part)

    def metrics(self) -> dict[str, float]:
        """Return statistics of the trajectories since the last call.

        Means of all values, the spread of rewards and response lengths, and the share of groups with equal rewards
        among the groups of several trajectories.
        """
        parts, self._parts = self._parts, []
        keys = dict.fromkeys(key for part in parts for key in part)
        values = {key: torch.cat([part[key].double() for part in parts if key in part]) for key in keys}
        metrics = {key: value.nanmean().item() for key, value in values.items() if not value.isnan().all()}
        for key in ("reward", "response_length"):
            metrics |= {f"{key}_min": values[key].min().item(), f"{key}_max": values[key].max().item()}
        metrics["reward_std"] = values["reward"].std(correction=0).item()
        for name, share in PERCENTILES.items():
            metrics[f"response_length_{name}"] = values["response_length"].quantile(share).item()
        return metrics


def mean_reward(batch: TensorDict) -> float:
    """Return the mean reward of the trajectories of a batch."""
    return _rewards(batch).mean().item()


def _rewards(batch: TensorDict) -> Tensor:
    """Return the reward of each trajectory [M], also if it is given token by token."""
    rewards = batch["rewards"][first_rows(batch)].double()
    return rewards if rewards.dim() == 1 else rewards.sum(1)


def _are_uniform(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return for each group of several trajectories whether all its rewards are equal."""
    members = [rewards[groups == group] for group in groups.unique()]
    return torch.tensor([len(own.unique()) == 1 for own in members if len(own) > 1])
