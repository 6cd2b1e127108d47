"""Compute advantages: the table of estimators of outcomes, the estimator behind GRPO, and tokens as a table of actions.

Statistics are computed in float64. In float32 the mean of eight rewards of 0.7 is not 0.7, and the rounding error
divided by itself looks like an advantage. Equal rewards give exactly 0. No function here carries a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rlite.algorithms.reduce import Configured, check_result, sequence_index
from rlite.algorithms.shapes import CuSeqlens, GroupIds, Mask, Sequences, Tokens
from rlite.errors import ConfigError
from rlite.registry import Table

Level = Literal["group", "batch"]
Singleton = Literal["zero", "raw"]

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
    estimator: str | AdvantageFunction | Configured,
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
        estimator: a name of `ADVANTAGES`, a function with the same signature, or either with its options.
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
    configured = Configured.of(ADVANTAGES, estimator, options or {})
    given = {"lengths": lengths, "greedy_rewards": greedy_rewards}
    needed = {key: given[key] for key in configured.needs}
    if missing := [key for key, value in needed.items() if value is None]:
        raise ConfigError(f"advantage {configured.name} needs {', '.join(missing)}")
    if is_example:
        what = f"{configured.what}, called at the start with {len(rewards)} example rewards,"
        configured = replace(configured, what=what)
    advantages = configured(rewards.clone(), group_ids.clone(), **needed)  # the function may write into them
    like = [*rewards.reshape(-1, *group_ids.shape)]
    return check_result(configured.what, advantages, like, is_deep=not is_example).detach()


@register_advantage("normalized")
@torch.no_grad()
def normalize_rewards(
    rewards: Sequences,
    group_ids: GroupIds,
    *,
    mean: Level | None = "group",
    std: Level | None = None,
    leave_one_out: bool = False,
    unbiased: bool = True,
    std_about: Literal["baseline", "own_mean"] = "baseline",
    eps: float = 1e-6,
    singleton: Singleton = "zero",
) -> Sequences:
    """Return normalised rewards as the advantage of every sequence.

    A = (R - mean) / (std + eps), the family to which GRPO, Dr. GRPO and RLOO belong.

    Args:
        rewards: one per sequence, `[N]`.
        group_ids: equal for the responses to one prompt, `[N]`.
        mean: "group" or "batch"; None subtracts no mean.
        std: "group" or "batch"; None does not divide.
        leave_one_out: leave the sequence itself out of the mean.
        unbiased: divide the variance by n - 1 instead of n.
        std_about: point from which the deviation is measured: the baseline that was subtracted, or the mean of the
            level that `std` names.
        eps: added to the deviation.
        singleton: "raw" gives a group of one its reward unchanged. "zero" applies the formula, 0 with mean "group".

    Raises:
        ConfigError: rewards and group_ids are not both `[N]`.
    """
    groups = group_indices(rewards, group_ids)
    levels = {"group": groups, "batch": torch.zeros_like(groups)}
    scores = rewards.double()
    centred = scores
    if mean is not None:
        ids = levels[mean]
        count, total = sum_over_set(torch.ones_like(scores), ids), sum_over_set(scores, ids)
        baseline = (total - scores) / (count - 1).clamp(min=1) if leave_one_out else total / count
        centred = torch.where(_are_equal_in_set(scores, ids), 0.0, scores - baseline)
    if std is not None:
        ids = levels[std]
        count = sum_over_set(torch.ones_like(scores), ids)
        distance = centred if std_about == "baseline" else scores - sum_over_set(scores, ids) / count
        variance = sum_over_set(distance.square(), ids) / (count - int(unbiased)).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)
    return as_advantages(with_singletons(centred, scores, groups, singleton), rewards)


def group_indices(rewards: Shaped[Tensor, " sequences"], group_ids: GroupIds) -> Int[Tensor, " sequences"]:
    """Return the number of each sequence's group, counted from 0, `[N]`.

    `rewards`: one per sequence, `[N]`. `group_ids`: equal for the responses to one prompt, `[N]`.
    """
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        found = f"{list(rewards.shape)}, {list(group_ids.shape)}"
        raise ConfigError(f"expected rewards [N] and group_ids [N], found {found}")
    return torch.unique(group_ids, return_inverse=True)[1]


def sum_over_set(x: Float[Tensor, "sequences *any"], ids: Int[Tensor, " sequences"]) -> Float[Tensor, "sequences *any"]:
    """Return for each member the sum over its set. `ids` number the sets from 0."""
    return torch.zeros_like(x).index_add(0, ids, x)[ids]


def as_advantages(wide: Float[Tensor, "*any"], rewards: Shaped[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return float64 values in the rewards' dtype, or in float32 for whole-number rewards."""
    return wide.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def with_singletons(advantages: Tensor, scores: Tensor, groups: Tensor, singleton: Singleton) -> Tensor:
    """Return advantages in which a group of one has its own score, if `singleton` is "raw".

    `advantages`: one per sequence, `[N]`. `scores`: rewards in float64, `[N]`. `groups`: number of each sequence's
    group, from 0, `[N]`.
    """
    if singleton == "zero":
        return advantages
    return torch.where(sum_over_set(torch.ones_like(scores), groups) == 1, scores, advantages)


def max_over_set(x: Sequences, ids: Int[Tensor, " sequences"]) -> Sequences:
    """Return for each member the greatest value of its set."""
    return torch.zeros_like(x).scatter_reduce(0, ids, x, "amax", include_self=False)[ids]


def _are_equal_in_set(x: Sequences, ids: Int[Tensor, " sequences"]) -> Bool[Tensor, " sequences"]:
    return max_over_set(x, ids) == -max_over_set(-x, ids)


ActionTable = Float[Tensor, "rows columns"]


class ActionTokens(NamedTuple):
    """The positions of the action tokens, flat and in a dense table `[sequences, most actions of a sequence]`.

    An estimator that steps over a sequence's actions steps over the table's columns, regardless of gaps between
    actions.
    """

    tokens_at: Int[Tensor, " actions"]
    rows: Int[Tensor, " actions"]
    columns: Int[Tensor, " actions"]
    num_rows: int
    num_columns: int
    shape: torch.Size

    @classmethod
    def of(cls, mask: Mask, cu_seqlens: CuSeqlens | None) -> ActionTokens:
        """Return the positions of the tokens with mask 1.

        `mask`: action tokens, `[T]` or `[B, L]`. `cu_seqlens`: boundaries of the sequences of a pack, `[N + 1]`.
        """
        index = sequence_index(mask, cu_seqlens).flatten()
        num_rows = mask.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        tokens_at = mask.flatten().bool().nonzero().squeeze(-1)
        tokens_at = tokens_at[index[tokens_at] < num_rows]
        rows = index[tokens_at]
        counts = torch.bincount(rows, minlength=num_rows)
        columns = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        return cls(tokens_at, rows, columns, num_rows, int(counts.max()) if num_rows else 0, mask.shape)

    def table(self, x: Tensor) -> ActionTable:
        """Return the tokens' values as a table in float64, 0 after each sequence's last action."""
        dense = torch.zeros(self.num_rows, self.num_columns, dtype=torch.float64, device=x.device)
        dense[self.rows, self.columns] = x.flatten()[self.tokens_at].double()
        return dense

    def tokens(self, table: ActionTable) -> Tokens:
        """Return a table's values at the positions of their tokens; 0 at other tokens."""
        flat = table.new_zeros(self.shape.numel())
        flat[self.tokens_at] = table[self.rows, self.columns]
        return flat.view(self.shape)


@torch.no_grad()
def last_action_rewards(scores: Sequences, mask: Mask, *, cu_seqlens: CuSeqlens | None = None) -> Tokens:
    """Return rewards of tokens: each sequence's score on its last token in the mask, and 0 on other tokens.

    Args:
        scores: one per sequence, `[N]`. A sequence without a token in the mask loses its score.
        mask: action tokens, `[T]` or `[B, L]`.
        cu_seqlens: boundaries of the sequences of a pack, `[N + 1]`.
    """
    index = sequence_index(mask, cu_seqlens).flatten()
    places = torch.arange(len(index), device=index.device).masked_fill(~mask.flatten().bool(), -1)
    last = places.new_full((len(scores) + 1,), -1).scatter_reduce(0, index, places, "amax")[:-1]
    rewards = scores.new_zeros(len(index) + 1)
    rewards[last] = scores  # -1 is the place beyond the end
    return rewards[:-1].view(mask.shape)
