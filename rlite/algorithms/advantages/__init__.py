"""Compute advantages of outcomes (`group`) and of tokens (`token`), with a table of the estimators of outcomes.

An estimator is a function `(rewards, group_ids, *, ...) -> advantages` of one number per sequence. Its keyword
parameters are its options. To add an estimator:

    @register_advantage("best_of_batch")
    def best_of_batch(rewards, group_ids, *, margin: float = 0.0):
        return rewards - rewards.max() + margin
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlite.algorithms.advantages.group import (
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    normalize_rewards,
    opo_advantages,
    pass_at_k_advantages,
    remax_advantages,
    rloo_advantages,
)
from rlite.algorithms.advantages.token import (
    discounted_returns,
    gae,
    last_action_rewards,
    masked_whiten,
    optimal_token_advantages,
    reinforce_pp_advantages,
)
from rlite.algorithms.registry import check_options, find, name_of, register
from rlite.algorithms.shapes import GroupIds, Sequences
from rlite.errors import ConfigError

AdvantageFunction = Callable[..., Tensor]


def _remax(rewards: Tensor, group_ids: Tensor, *, greedy_rewards: Tensor) -> Tensor:
    return remax_advantages(rewards, greedy_rewards)


ADVANTAGES: dict[str, AdvantageFunction] = {
    "dr_grpo": group_advantages,
    "gdpo": gdpo_advantages,
    "gpg": gpg_advantages,
    "grpo": partial(group_advantages, norm_std=True),
    "normalized": normalize_rewards,
    "opo": opo_advantages,
    "pass_at_k": pass_at_k_advantages,
    "remax": _remax,
    "rloo": rloo_advantages,
}
"""estimators by name"""
NEEDS: dict[str, tuple[str, ...]] = {"opo": ("lengths",), "remax": ("greedy_rewards",)}
"""tensors that an estimator is given as keyword arguments, beside rewards and group_ids"""


def outcome_advantages(
    estimator: str | AdvantageFunction,
    rewards: Float[Tensor, "*kinds sequences"],
    group_ids: GroupIds,
    *,
    lengths: Shaped[Tensor, " sequences"] | None = None,
    greedy_rewards: Sequences | None = None,
    options: Mapping[str, Any] | None = None,
) -> Sequences:
    """Return the advantage of every sequence.

    Args:
        estimator: a name of `ADVANTAGES`, or a function with the same signature.
        rewards: one per sequence, `[N]`; for "gdpo" one row per kind of reward, `[K, N]`.
        group_ids: equal for the responses to one prompt, `[N]`.
        lengths: action tokens of each sequence, `[N]`, for estimators that need them.
        greedy_rewards: reward of the greedy response to the same prompt, `[N]`, for estimators that need it.
        options: keyword arguments of the estimator.

    Raises:
        ConfigError: the name is unknown, a tensor that the estimator needs is missing, or an option has a value of
            the wrong kind.
        UnknownOptionError: the estimator has no such option.
    """
    function = check_advantage(estimator, options or {})
    name = name_of(ADVANTAGES, function)
    given = {"lengths": lengths, "greedy_rewards": greedy_rewards}
    needed = {key: given[key] for key in NEEDS.get(name, ())}
    if missing := [key for key, value in needed.items() if value is None]:
        raise ConfigError(f"advantage {name} needs {', '.join(missing)}")
    return function(rewards, group_ids, **needed, **(options or {}))


def check_advantage(estimator: str | AdvantageFunction, options: Mapping[str, Any]) -> AdvantageFunction:
    """Return the function of this name.

    Raises:
        ConfigError: the name is unknown, or an option has a value of the wrong kind.
        UnknownOptionError: the estimator has no such option.
    """
    function = find(ADVANTAGES, estimator, "advantage")
    name = name_of(ADVANTAGES, function)
    check_options(function, options, f"advantage {name}", ("rewards", "group_ids"), NEEDS.get(name, ()))
    return function


def is_of_group_alone(estimator: str | AdvantageFunction, options: Mapping[str, Any], group_size: int) -> bool:
    """Return whether a group's advantages depend only on this group, and are 0 if its rewards are equal.

    The estimator is run on examples, so the answer also holds for user-defined functions.

    Args:
        estimator: a name of `ADVANTAGES`, or a function with the same signature.
        options: keyword arguments of the estimator.
        group_size: sequences in a group, at least 2.
    """
    mixed = torch.arange(group_size) % 2
    groups = torch.stack([torch.full_like(mixed, value) for value in (0, 1, -2)] + [mixed, 3 * mixed - 1]).double()
    lengths = torch.arange(1, groups.numel() + 1).view(groups.shape)

    def advantages(chosen: slice) -> Tensor:
        ids = torch.arange(len(groups))[chosen].repeat_interleave(group_size)
        rewards, counts = groups[chosen].flatten(), lengths[chosen].flatten()
        return outcome_advantages(estimator, rewards, ids, lengths=counts, options=options)

    together = advantages(slice(None))
    alone = torch.cat([advantages(slice(number, number + 1)) for number in range(len(groups))])
    return torch.allclose(together, alone) and not together[: 3 * group_size].any()


def register_advantage(name: str, *, needs: tuple[str, ...] = ()) -> Callable[[AdvantageFunction], AdvantageFunction]:
    """Register a function as the advantage estimator of this name.

    Args:
        name: the value of `adv.estimator`.
        needs: tensors that the function takes as keyword arguments: "lengths", "greedy_rewards".

    Returns:
        A decorator, which returns the function unchanged.

    Raises:
        ConfigError: the name is taken by another function, or `needs` names an unknown tensor.
    """
    if unknown := set(needs) - {"lengths", "greedy_rewards"}:
        raise ConfigError(f"needs={needs}: expected lengths or greedy_rewards, found {', '.join(sorted(unknown))}")

    def enter(function: AdvantageFunction) -> AdvantageFunction:
        register(ADVANTAGES, name, function)
        NEEDS[name] = needs
        return function

    return enter
