"""Adapt reward functions with other libraries' signatures. Sandbox processes load this module: it imports no torch."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlite.errors import ConfigError
from rlite.rollout.rewards.score import Sum, Unusable, as_number


def from_trl(
    fn: Callable[..., Any] | Sequence[Callable[..., Any]],
    is_conversational: bool | None = False,
    weights: Sequence[float] | None = None,
) -> TrlReward:
    """Return a reward function made of functions with TRL's signature.

    The signature is `f(prompts, completions, completion_ids, **columns) -> list`. RewardFunction calls the functions
    with lists of one entry. With `batch_size` or in `RewardFunction.batch`, the lists are longer. Functions that accept
    TRL's `trainer_state`, `log_extra` and `log_metric` receive None and two empty functions.

    Args:
        fn: one function or several, synchronous or async. The reward is the weighted sum of their rewards. The rewards
            of several functions are reported separately, as `reward/NAME`. As in TRL, an entry None does not count. If
            all entries are None, there is no reward, and the call ends as invalid.
        is_conversational: pass prompts as lists of messages (the row's `messages`) and completions as lists of one
            assistant message, as TRL does for conversational data. None: if the row has `messages`.
        weights: a weight for each function, TRL's `reward_weights`. Default: 1 each.

    Returns:
        A function for RewardFunction.

    Raises:
        ConfigError: weights and functions differ in number.
    """
    fns = (fn,) if callable(fn) else tuple(fn)
    factors = (1.0,) * len(fns) if weights is None else tuple(weights)
    if not fns or len(fns) != len(factors):
        raise ConfigError(f"from_trl: {len(fns)} functions and {len(factors)} weights; expected one weight for each")
    return TrlReward(fns, factors, is_conversational)


@dataclass(frozen=True)
class TrlReward:
    """One reward function made of functions with TRL's signature."""

    fns: tuple[Callable[..., Any], ...]
    weights: tuple[float, ...]
    is_conversational: bool | None
    is_part: bool = False
    """the sum is a part of a larger sum: a single function has a name, too, and a sum that does not count is 0"""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions if the result has parts, else empty. A repeated name gets a number."""
        has_parts = self.is_part or len(self.fns) > 1
        names = [getattr(fn, "__name__", type(fn).__name__) for fn in self.fns] if has_parts else []
        return tuple(f"{name}_{i}" if name in names[:i] else name for i, name in enumerate(names))

    def __call__(self, /, prompt: Any, completions: Any, prompt_ids: Any, completion_ids: Any, **data: Any) -> Any:
        """Return the weighted sum of the functions' results, or an awaitable of it if a function is async.

        Args:
            prompt: text of the prompt, or a list of texts.
            completions: text of the completion, or a list of texts.
            prompt_ids: not read.
            completion_ids: tokens of the completion, or a list of them.
            **data: the row's other columns, or lists of them.
        """
        is_batch = not isinstance(completions, str)
        columns = {**data, "prompts": prompt, "completions": completions, "completion_ids": completion_ids}
        if not is_batch:
            columns = {key: [value] for key, value in columns.items()}
        columns["completion_ids"] = [list(ids) for ids in columns["completion_ids"]]
        if self.is_conversational or (self.is_conversational is None and "messages" in columns):
            columns["prompts"] = columns.pop("messages")
            columns["completions"] = [[{"role": "assistant", "content": text}] for text in columns["completions"]]
        count = len(columns["completions"])
        results = [call_selectively(fn, **{**columns, **_TRAINERS_OWN}) for fn in self.fns]
        if any(map(inspect.isawaitable, results)):
            return self._later(results, count, is_batch)
        return self._sum(results, count, is_batch)

    async def _later(self, results: list[Any], count: int, is_batch: bool) -> Any:
        async def value_of(result: Any) -> Any:
            return await result if inspect.isawaitable(result) else result

        return self._sum(await asyncio.gather(*map(value_of, results)), count, is_batch)

    def _sum(self, results: Sequence[Any], count: int, is_batch: bool) -> Any:
        lists = [list(result) if hasattr(result, "__len__") else result for result in results]
        for fn, values in zip(self.fns, lists, strict=True):
            if not isinstance(values, list) or len(values) != count:
                found = f"{len(values)} values" if isinstance(values, list) else repr(values)
                name, lists_of = getattr(fn, "__name__", fn), "TRL's functions return a list with one for each"
                return Unusable(f"{found} from {name} for {count} completions ({lists_of})")
        sums = [self._sum_of_one(entries) for entries in zip(*lists, strict=True)]
        return sums if is_batch else sums[0]

    def _sum_of_one(self, entries: tuple[Any, ...]) -> Any:
        numbers = [(weight, entry) for weight, entry in zip(self.weights, entries, strict=True) if entry is not None]
        for _, entry in numbers:
            if as_number(entry) is None:
                return Unusable(repr(entry))
        total = sum(weight * float(entry) for weight, entry in numbers) if numbers or self.is_part else None
        return Sum(total, list(entries)) if self.names else total


def _ignore(*args: Any, **options: Any) -> None:
    """Log nothing."""


_TRAINERS_OWN = {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
"""arguments beside the columns that TRL's trainer passes"""


def takes_all(signature: inspect.Signature) -> bool:
    """Return whether a function of this signature accepts every keyword argument."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function; of a decorated function, unless its wrapper takes fewer arguments."""
    try:
        own = inspect.signature(fn, follow_wrapped=False)
    except ValueError:  # a wrapper that is written in C
        return inspect.signature(fn)
    return inspect.signature(fn) if takes_all(own) else own


def call_selectively(fn: Callable[..., Any], /, **keywords: Any) -> Any:
    """Return the result of a function that gets only the keyword arguments that it accepts."""
    signature = signature_of(fn)
    accepted = keywords if takes_all(signature) else [key for key in keywords if key in signature.parameters]
    return fn(**{key: keywords[key] for key in accepted})  # in their order, which a wrapper of `fn` sees


def from_verl(compute_score: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward function made of a function with verl's signature.

    The row holds `data_source`, `reward_model: {ground_truth}` (or `ground_truth`) and optionally `extra_info`, as in
    verl's files. Without `data_source` the function receives None, without `extra_info` an empty dict. A row without a
    ground truth raises KeyError.

    Args:
        compute_score: `f(data_source, solution_str, ground_truth, extra_info)`, sync or async. It may leave some of
            these arguments out. If it returns a dict, the reward is the dict's `score`, and `pred` names the answer.
    """
    return partial(_verl_score, compute_score)


def _verl_score(compute_score: Callable[..., Any], /, completions: str, **data: Any) -> Any:
    """Return the score of a completion, or an awaitable of it if the function is async."""
    return call_selectively(
        compute_score,
        data_source=data.get("data_source"),
        solution_str=completions,
        ground_truth=data["reward_model"]["ground_truth"] if "reward_model" in data else data["ground_truth"],
        extra_info=data.get("extra_info") or {},
    )
