"""The advantages of outcomes by name, and the one way to call any of them.

Each is a function `(rewards, group_ids, *, ...) -> advantages` of one number per sequence. By naming them as keyword
parameters it is given what it needs of the batch (`GIVEN`); its other keyword parameters are options. Your own:

    @register_advantage("best_of_batch")
    def best_of_batch(rewards, group_ids, *, margin=0.0):
        return rewards - rewards.max() + margin
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from rlite.algorithms.advantages import group_advantages, normalize_rewards, remax_advantages, rloo_advantages
from rlite.algorithms.baselines import gdpo_advantages, gpg_advantages, opo_advantages, pass_at_k_advantages
from rlite.algorithms.registry import check_options, find, keyword_parameters, name_of, register
from rlite.errors import ConfigError

AdvantageFunction = Callable[..., Tensor]

GIVEN = ("lengths", "greedy_rewards")
"""what an advantage may ask for by naming it; see `outcome_advantages`"""


def outcome_advantages(
    estimator: str | AdvantageFunction,
    rewards: Float[Tensor, "*kinds sequences"],
    group_ids: Int[Tensor, " sequences"],
    *,
    lengths: Shaped[Tensor, " sequences"] | None = None,
    greedy_rewards: Float[Tensor, " sequences"] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Float[Tensor, " sequences"]:
    """The advantage of every sequence, by an estimator of `ADVANTAGES` or a function like them.

    Args:
        estimator: a registered name or a function.
        rewards: one per sequence; for gdpo one row per kind of reward.
        group_ids: equal for responses to the same prompt.
        lengths: numbers of action tokens, which opo needs.
        greedy_rewards: of the greedy response to the same prompt, which remax needs.
        options: of the estimator.

    Raises: ConfigError for an unknown name and for what the estimator needs and is not given, UnknownOptionError for
        an unknown option; `check_advantage` asks before.
    """
    function = check_advantage(estimator, options or {})
    batch = {"lengths": lengths, "greedy_rewards": greedy_rewards}
    asked = keyword_parameters(function)
    given = {name: value for name, value in batch.items() if name in asked}
    if missing := [k for k, value in given.items() if value is None and asked[k].default is inspect.Parameter.empty]:
        raise ConfigError(f"advantage {name_of(ADVANTAGES, function)} needs {', '.join(missing)}")
    return function(rewards, group_ids, **given, **(options or {}))


def check_advantage(estimator: str | AdvantageFunction, options: Mapping[str, Any]) -> AdvantageFunction:
    """The function of that name. Raises: ConfigError for an unknown name, or an option's value of another kind than
    annotated; UnknownOptionError for an unknown option."""
    function = find(ADVANTAGES, estimator, "advantage")
    check_options(function, options, f"advantage {name_of(ADVANTAGES, function)}", reserved=GIVEN)
    return function


def is_of_group_alone(estimator: str | AdvantageFunction, options: Mapping[str, Any], group_size: int) -> bool:
    """Return whether a group's advantages depend on this group alone, and are 0 if its rewards are equal.

    The estimator is tried out, so that the answer holds for functions of one's own, too.

    Args:
        estimator: a registered name or a function.
        options: of the estimator.
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


def register_advantage(name: str) -> Callable[[AdvantageFunction], AdvantageFunction]:
    """A decorator that makes a function an advantage of that name. Raises: ConfigError if the name is taken."""
    return register(ADVANTAGES, name)


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
