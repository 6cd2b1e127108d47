"""Define the table of the estimators of outcomes, and calls of its estimators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlite.algorithms.results import check_result
from rlite.algorithms.shapes import GroupIds, Sequences
from rlite.errors import ConfigError
from rlite.registry import Table

AdvantageFunction = Callable[..., Tensor]
ADVANTAGES: Table[AdvantageFunction] = Table("advantage", given=("rewards", "group_ids"))
"""estimators by name"""


def register_advantage(name: str, *, needs: tuple[str, ...] = ()) -> Callable[[AdvantageFunction], AdvantageFunction]:
    """Register a function as the advantage estimator of this name.

    Args:
        name: the value of `adv.estimator`.
        needs: tensors that the function takes as keyword arguments: "lengths", "greedy_rewards".

    Returns:
        A decorator, which returns the function unchanged.

    Raises:
        ConfigError: `needs` names an unknown tensor, or another function has the name.
    """
    if unknown := set(needs) - {"lengths", "greedy_rewards"}:
        raise ConfigError(f"needs={needs}: expected lengths or greedy_rewards, found {', '.join(sorted(unknown))}")
    return ADVANTAGES.register(name, needs)


def outcome_advantages(
    estimator: str | AdvantageFunction,
    rewards: Float[Tensor, "*kinds sequences"],
    group_ids: GroupIds,
    *,
    lengths: Shaped[Tensor, " sequences"] | None = None,
    greedy_rewards: Sequences | None = None,
    options: Mapping[str, Any] | None = None,
    is_example: bool = False,
) -> Sequences:
    """Return the advantage of every sequence.

    Args:
        estimator: a name of `ADVANTAGES`, or a function with the same signature.
        rewards: one per sequence, `[N]`; for "gdpo" one row per kind of reward, `[K, N]`.
        group_ids: equal for the responses to one prompt, `[N]`.
        lengths: action tokens of each sequence, `[N]`, for estimators that need them.
        greedy_rewards: reward of the greedy response to the same prompt, `[N]`, for estimators that need it.
        options: keyword arguments of the estimator.
        is_example: the rewards are examples, for which an estimator may return NaN.

    Raises:
        ConfigError: the name is unknown, a tensor that the estimator needs is missing, an option has a value of the
            wrong kind, or the estimator returns something else than a finite advantage for each sequence.
        OwnCodeError: the estimator is the user's, and raised an exception.
        UnknownOptionError: the estimator has no such option.
    """
    given = {"lengths": lengths, "greedy_rewards": greedy_rewards}
    name = ADVANTAGES.name_of(estimator)
    needed = {key: given[key] for key in ADVANTAGES.needs.get(name, ())}
    if missing := [key for key, value in needed.items() if value is None]:
        raise ConfigError(f"advantage {name} needs {', '.join(missing)}")
    note = f", called at the start with {len(rewards)} example rewards," if is_example else ""
    own = rewards.clone(), group_ids.clone()  # the function may write into them
    what, advantages = ADVANTAGES.call(estimator, options or {}, *own, note=note, **needed)
    return check_result(what, advantages, [*rewards.reshape(-1, *group_ids.shape)], is_deep=not is_example).detach()


def is_of_group_alone(estimator: str | AdvantageFunction, options: Mapping[str, Any], group_size: int) -> bool:
    """Return whether a group's advantages depend only on this group, and are 0 if its rewards are equal.

    The estimator is run on examples, so the answer also holds for user-defined functions.

    Args:
        estimator: a name of `ADVANTAGES`, or a function with the same signature.
        options: keyword arguments of the estimator.
        group_size: sequences in a group, at least 2.

    Raises:
        ConfigError: the estimator returns something else than one advantage for each sequence.
        OwnCodeError: the estimator is the user's, and raised an exception.
    """
    mixed = torch.arange(group_size) % 2
    groups = torch.stack([torch.full_like(mixed, value) for value in (0, 1, -2)] + [mixed, 3 * mixed - 1]).double()
    lengths = torch.arange(1, groups.numel() + 1).view(groups.shape)

    def advantages(chosen: slice) -> Tensor:
        ids = torch.arange(len(groups))[chosen].repeat_interleave(group_size)
        rewards, counts = groups[chosen].flatten(), lengths[chosen].flatten()
        return outcome_advantages(estimator, rewards, ids, lengths=counts, options=options, is_example=True)

    together = advantages(slice(None))
    alone = torch.cat([advantages(slice(number, number + 1)) for number in range(len(groups))])
    return torch.allclose(together, alone) and not together[: 3 * group_size].any()
