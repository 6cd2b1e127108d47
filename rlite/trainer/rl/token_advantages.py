"""Less frequent estimators: gae, the whitened ones and named rewards; and the choice of an estimator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.algorithms import ADVANTAGES, gae, masked_mean, masked_variance, normalize_rewards, reinforce_pp_advantages
from rlite.algorithms.reduce import Configured
from rlite.batch import NAMED_REWARD
from rlite.data.packs import first_rows
from rlite.errors import DataError
from rlite.trainer.rl.options import WHITENED, AdvantageOptions


def token_advantages(
    batch: TensorDict, rewards: Tensor, adv: AdvantageOptions, groups: Tensor, real: Tensor, cu_seqlens: Tensor
) -> dict[str, Tensor]:
    """Return `advantages` [N, L], and for gae `returns` [N, L].

    REINFORCE++ whitens returns; its other form whitens outcomes over their group's mean.

    `rewards`: reward of each token, [N, L]. `groups`: group of each trajectory, [M]. `real`: positions that hold
    tokens, [N, L]. `cu_seqlens`: boundaries of the trajectories among these, [M + 1].
    """
    rewards, mask = rewards[real], batch["loss_mask"][real].bool()
    if adv.estimator == "gae":
        advantages, returns = gae(rewards, batch["values"][real], mask, adv.gamma, adv.lamda, cu_seqlens=cu_seqlens)
        return {"advantages": _placed(_normalized(advantages, mask, adv), real), "returns": _placed(returns, real)}
    means = None if adv.estimator == "reinforce_pp" else groups
    whitened = reinforce_pp_advantages(rewards, mask, adv.gamma, group_ids=means, cu_seqlens=cu_seqlens)
    return {"advantages": _placed(whitened, real)}


def _placed(values: Tensor, real: Tensor) -> Tensor:
    """Return the values of tokens at their places [N, L], and 0 elsewhere."""
    return torch.zeros(real.shape).masked_scatter(real, values.float())


def _normalized(advantages: Tensor, mask: Tensor, adv: AdvantageOptions) -> Tensor:
    """Return (A - mean) / std over the action tokens of the batch; the options say which of the two apply.

    Advantages that are all equal have no deviation to be divided by, and stay as they are.
    """
    wide = advantages.double()
    if adv.norm_var and len(advantages[mask].unique()) > 1:
        wide = wide * (masked_variance(wide, mask) + 1e-8).rsqrt()
    if adv.global_norm:
        wide = wide - masked_mean(wide, mask)
    return torch.where(mask, wide, 0.0)


def outcome_estimator(adv: AdvantageOptions) -> Configured | None:
    """Return the estimator of outcomes that the options name; None for gae and the whitened estimators."""
    if adv.estimator in ("gae", *WHITENED):
        return None
    if adv.estimator != "reinforce":
        return Configured.of(ADVANTAGES, adv.estimator, adv.options)
    level: Any = "batch" if adv.global_norm else "group"
    mean = partial(normalize_rewards, mean=level, std=level if adv.norm_var else None)
    return Configured.of(ADVANTAGES, mean, adv.options)


def of_named_rewards(
    batch: TensorDict, estimator: Configured, weights: Mapping[str, float]
) -> tuple[Tensor, Configured]:
    """Return the named rewards of the trajectories [K, M], NaN where one does not count, and gdpo with their weights.

    `weights`: weights of rewards by name; default: 1.
    """
    keys = sorted(key for key in map(str, batch.keys()) if key.startswith(NAMED_REWARD))
    if not keys:
        raise DataError("adv.estimator=gdpo: the batch has no reward/NAME; a reward with parts by name writes them")
    first = first_rows(batch)
    given = {"weights": [weights.get(key.removeprefix(NAMED_REWARD), 1.0) for key in keys], **estimator.options}
    return torch.stack([batch[key][first].double() for key in keys]), replace(estimator, options=given)
