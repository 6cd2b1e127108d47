"""Reward functions: ordinary Python functions, run where they can neither block, hang nor crash the program."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import os
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle

from rlite.errors import ConfigError, DataError
from rlite.rollout.reward_pool import (
    RewardCode,
    RewardCrash,
    RewardError,
    RewardInvalid,
    RewardRaised,
    RewardTimeout,
    shared_pool,
)
from rlite.rollout.reward_process import INVALID, checked_result


def default_num_processes() -> int:
    """The cores that this process may use, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8)


class RewardFunction:
    """Awaits `fn(prompt, completions, prompt_ids, completion_ids, **data)`, run in a process that can be killed.

        reward = RewardFunction(fn, timeout=10)
        score = await reward(prompt=..., completions=..., prompt_ids=..., completion_ids=..., answer=...)

    `fn` may be a lambda, a function of `__main__`, or `async`. It travels by cloudpickle, and its process imports
    only what it needs. Every call ends with a finite float or with a RewardError that says what became of it:
    RewardTimeout, RewardCrash, RewardRaised or RewardInvalid. A hung or crashed function costs its own process alone.

    Args:
        fn: the function; `from_trl` and `from_verl` turn those libraries' functions into one.
        timeout: seconds from the function's own start.
        retries: further attempts after a time-out, a crash or an exception.
        num_processes: processes that the program's reward pool has at least room for; default: the cores, at most 8.
        in_process: run `fn` in the event loop instead, at no cost; for cheap functions that cannot hang. The time-out
            then bounds `async` functions only.
        what: its name in error messages.

    `outcomes` counts the attempts by their end: ok, timeout, crash, raised, invalid.
    Raises: ConfigError for options out of range, or a function that cannot be pickled.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        timeout: float = 15.0,
        retries: int = 0,
        num_processes: int | None = None,
        in_process: bool = False,
        what: str = "the reward function",
    ) -> None:
        if not callable(fn):
            raise ConfigError(f"RewardFunction({fn!r}): expected a function")
        if timeout <= 0 or retries < 0 or (num_processes is not None and num_processes < 1):
            raise ConfigError(
                f"timeout={timeout}, retries={retries}, num_processes={num_processes}: "
                "expected a time-out above 0, at least 0 retries and at least 1 process"
            )
        self.fn = fn
        self.timeout = timeout
        self.retries = retries
        self.num_processes = num_processes or default_num_processes()
        self.in_process = in_process
        self.what = what
        self.outcomes: Counter[str] = Counter()
        if not in_process:
            try:
                blob = cloudpickle.dumps(fn)
            except Exception as error:
                raise ConfigError(
                    f"{what} {fn!r} cannot be sent to another process ({error}); "
                    "let it hold plain data only, or run it with in_process=True"
                ) from error
            self._code = RewardCode(hashlib.blake2b(blob, digest_size=16).digest(), blob, what=what)

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
    ) -> float:
        """The reward of one completion. Raises: RewardError; DataError if `data` cannot be pickled."""
        keywords = {
            "prompt": prompt,
            "completions": completions,
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            **data,
        }
        return await self.run(**keywords)

    async def run(self, **keywords: Any) -> Any:
        """Call the function with just these arguments; returns a float, or the bytes that it `Passed`."""
        attempts = 0
        while True:
            attempts += 1
            try:
                value = await (self._run_here(keywords) if self.in_process else self._run_there(keywords))
            except RewardError as error:
                self.outcomes[error.outcome] += 1
                if attempts > self.retries or isinstance(error, RewardInvalid):
                    raise
            else:
                self.outcomes["ok"] += 1
                return value

    async def _run_there(self, keywords: dict[str, Any]) -> Any:
        try:
            arguments = cloudpickle.dumps(keywords)
        except Exception as error:
            raise DataError(f"a row cannot be sent to the reward process: {error}") from error
        return await asyncio.wrap_future(shared_pool(self.num_processes).submit(self._code, arguments, self.timeout))

    async def _run_here(self, keywords: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self.timeout) as limit:
                value = self.fn(**keywords)
                if inspect.isawaitable(value):
                    value = await value
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                raise RewardTimeout(f"{self.what} ran for more than {self.timeout:g} s") from error
            raise RewardRaised(f"{self.what} raised:\n{traceback.format_exc()}") from error
        kind, result = checked_result(value)
        if kind == INVALID:
            raise RewardInvalid(f"{self.what} returned {result}; expected a finite number")
        return result


def from_trl(fn: Callable[..., Any], is_conversational: bool = False) -> Callable[..., Any]:
    """A function of TRL's signature, `f(prompts, completions, completion_ids, **columns) -> list`, for RewardFunction.

    It is called with lists of one. With `is_conversational` prompts are lists of messages (the row's `messages`) and
    completions lists of one assistant message, as TRL gives them for conversational data.
    """
    return partial(_call_trl, fn, is_conversational)


def _call_trl(
    fn: Callable[..., Any],
    is_conversational: bool,
    prompt: Any,
    completions: Any,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    **data: Any,
) -> Any:
    if is_conversational:
        prompt = data.pop("messages")
        completions = [{"role": "assistant", "content": completions}]
    columns = {key: [value] for key, value in data.items()}
    result = fn(prompts=[prompt], completions=[completions], completion_ids=[list(completion_ids)], **columns)
    return _first_of(result) if inspect.isawaitable(result) else result[0]


async def _first_of(result: Any) -> Any:
    return (await result)[0]


def from_verl(compute_score: Callable[..., Any]) -> Callable[..., Any]:
    """A function of verl's signature, `compute_score(data_source, solution_str, ground_truth, extra_info)`, for
    RewardFunction.

    The row holds `data_source`, `reward_model: {ground_truth}` (or `ground_truth`) and perhaps `extra_info`, as verl's
    files do. A result that is a dict counts with its `score`.
    """
    return _VerlReward(compute_score)


@dataclass(frozen=True)
class _VerlReward:
    compute_score: Callable[..., Any]

    def __call__(self, completions: str, **data: Any) -> Any:
        truth = data["reward_model"]["ground_truth"] if "reward_model" in data else data.get("ground_truth")
        result = self.compute_score(
            data_source=data.get("data_source"),
            solution_str=completions,
            ground_truth=truth,
            extra_info=data.get("extra_info"),
        )
        return result["score"] if isinstance(result, dict) else result


__all__ = [
    "RewardCrash",
    "RewardError",
    "RewardFunction",
    "RewardInvalid",
    "RewardRaised",
    "RewardTimeout",
    "from_trl",
    "from_verl",
]
