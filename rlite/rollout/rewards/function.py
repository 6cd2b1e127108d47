"""Run ordinary Python functions as reward functions, in processes that cannot block, hang or crash the program."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlite.errors import ConfigError, shortened
from rlite.observability import trace
from rlite.rollout.episode import current_episode, in_reward
from rlite.rollout.failures import REWARD_ERRORS, RewardError, RewardInvalid
from rlite.rollout.rewards.adapters import TrlReward
from rlite.rollout.rewards.batches import JoinedCalls, read_batch, score_batch
from rlite.rollout.rewards.judges import JudgeLoop, Retrying, Slots, check_options
from rlite.rollout.rewards.score import Reward, read_score, score
from rlite.runtime.sandbox.function import SandboxFunction, limited


class RewardFunction:
    """A reward function, run in a process that can be killed.

    The signature is `fn(prompt, completions, prompt_ids, completion_ids, **data)`.

        reward = RewardFunction(fn, timeout=10)
        score = await reward(prompt=..., completions=..., prompt_ids=..., completion_ids=..., answer=...)

    `fn` may be a lambda, a function of `__main__`, or `async`. It is pickled by cloudpickle, and its process imports
    only what `fn` needs. Every call ends with a finite float or with a RewardError that names the cause: RewardTimeout,
    RewardCrash, RewardMemory, RewardRaised or RewardInvalid. A hung or crashed function costs only its own process.
    `outcomes` counts the attempts by their end: ok, timeout, crash, memory, raised, invalid.

    Args:
        fn: the function. `from_trl` and `from_verl` adapt functions written for those libraries.
        timeout: seconds from the function's own start.
        retries: number of immediate further attempts after a failure; an invalid result is not attempted again. Or a
            `tenacity.AsyncRetrying`, which sees the RewardErrors and decides on attempts and waits.
        num_processes: number of processes that the program's pool has room for, at least. Default: the cores, at most
            8.
        in_process: use no process. A synchronous `fn` runs in its caller's event loop, without overhead. Use it for
            cheap functions that cannot hang, because the time-out does not cover them. The awaitable of an `async` `fn`
            runs in a thread with an event loop of its own. Use it for functions that only wait, such as for a judge.
        memory_limit_gib: resident memory that the process may have, in GiB. None sets no limit.
        max_concurrent: maximum number of calls that run at once. Waiting for a turn is not part of the time-out.
        batch_size: maximum number of calls in a batch. `fn` then takes a list in place of each argument and returns a
            list of rewards. If a batch fails, its calls are repeated one by one. Each completion therefore has the
            outcome that it would have alone.
        batch_wait: seconds that the first call of a batch waits for others.
        what: name of the function in error messages.
        env_vars: names of environment variables that the process also receives, such as an API key. Without them it
            receives the variables that Python, the machine and its numerics need, and no secrets of the run.

    Raises:
        ConfigError: an option is out of range, or the function cannot be pickled.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        timeout: float = 15.0,
        retries: int | Retrying = 0,
        num_processes: int | None = None,
        in_process: bool = False,
        memory_limit_gib: float | None = None,
        max_concurrent: int | None = None,
        batch_size: int | None = None,
        batch_wait: float = 0.02,
        what: str = "the reward function",
        env_vars: Sequence[str] = (),
    ) -> None:
        check_options(fn, timeout, batch_wait, retries, max_concurrent=max_concurrent, batch_size=batch_size)
        if in_process and memory_limit_gib is not None:
            raise ConfigError(f"memory_limit_gib={memory_limit_gib}, in_process=True: a limit needs a process")
        self.fn, self.timeout, self.retries, self.in_process, self.what = fn, timeout, retries, in_process, what
        self.outcomes: Counter[str] = Counter()
        self._names = fn.names if isinstance(fn, TrlReward) else ()
        self._slots = None if max_concurrent is None else Slots(max_concurrent)
        self._loop = JudgeLoop(what, timeout)
        self._joined = JoinedCalls(self._call_batch, batch_size, batch_wait)
        if not in_process:
            options = (fn, timeout, num_processes, memory_limit_gib, what, env_vars)
            self._functions: dict[Callable[[Any], Any], SandboxFunction] = {
                finish: SandboxFunction(*options, finish=finish, errors=REWARD_ERRORS)
                for finish in (score, score_batch)
            }

    async def __call__(
        self, /, prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
    ) -> float:
        """Return the reward of one completion."""
        return await self.run(
            prompt=prompt, completions=completions, prompt_ids=prompt_ids, completion_ids=completion_ids, **data
        )

    async def run(self, /, **keywords: Any) -> float:
        """Return the reward of a call with exactly these arguments.

        Args:
            **keywords: arguments of the function.

        Raises:
            RewardError: there is no reward. The class depends on the outcome.
        """
        with trace.task(self.what.removeprefix("the ")), in_reward():
            try:
                return noted(self, await self._attempt(self._compute, keywords, count=1))
            except RewardError as error:
                if "completions" in keywords:
                    error.add_note(f"completion: {shortened(keywords['completions'])}")
                raise

    async def batch(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the rewards of completions that belong together, by one call with lists.

        This method suits functions that compare the completions of a group. It does not depend on `batch_size`. The
        call fails as a whole, and `outcomes` then counts every row with the same failure.

        Args:
            rows: arguments of each completion.

        Raises:
            RewardError: there are no rewards. The class depends on the outcome.
        """
        with in_reward():
            return await self._attempt(self._compute_batch, rows, count=len(rows))

    async def _attempt(self, compute: Callable[[Any], Awaitable[Any]], argument: Any, count: int) -> Any:
        if not isinstance(self.retries, int):
            policy = self.retries.copy(reraise=True)  # its state is that of one call
            return await policy(self._counted, compute, argument, count)
        attempts = 0
        while True:
            attempts += 1
            try:
                return await self._counted(compute, argument, count)
            except RewardError as error:
                if attempts > self.retries or isinstance(error, RewardInvalid):
                    raise

    async def _counted(self, compute: Callable[[Any], Awaitable[Any]], argument: Any, count: int) -> Any:
        try:
            rewards = await compute(argument)
        except RewardError as error:
            self.outcomes[error.outcome] += count
            raise
        self.outcomes["ok"] += count
        return rewards

    async def _compute(self, keywords: dict[str, Any]) -> float:
        if self._joined.size is not None:
            return self._reward(await self._joined.result(keywords))
        answer = await self._call(score, keywords)
        if _is_finite_float(answer) and not self._names:
            return answer
        return self._reward(read_score(answer, self._names), answer)

    async def _compute_batch(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        return [self._reward(result) for result in await self._call_batch(rows)]

    def _reward(self, result: Any, answer: Any = None) -> Any:
        """Return a valid result."""
        if result is None:
            raise RewardInvalid(f"{self.what} answered {answer!r:.200}, which is not the expected form")
        if isinstance(result, str):
            raise RewardInvalid(f"{self.what} returned {result}; expected a finite number")
        return result

    # -- one call ------------------------------------------------------------------------------------------------

    async def _call(self, finish: Callable[[Any], Any], keywords: dict[str, Any]) -> Any:
        if self._slots is None:
            return await self._call_at_once(finish, keywords)
        async with self._slots.one():
            return await self._call_at_once(finish, keywords)

    async def _call_at_once(self, finish: Callable[[Any], Any], keywords: dict[str, Any]) -> Any:
        if not self.in_process:
            return await self._functions[finish].call(**keywords)
        async with limited(self.what, None, REWARD_ERRORS):
            value = self.fn(**keywords)
        value = await self._loop.run(value) if inspect.isawaitable(value) else value
        return value if _is_finite_float(value) else finish(value)

    async def _call_batch(self, rows: Sequence[Mapping[str, Any]]) -> list[float | str]:
        names = dict.fromkeys(name for row in rows for name in row)
        answer = await self._call(score_batch, {name: [row.get(name) for row in rows] for name in names})
        return self._reward(read_batch(answer, len(rows), self._names), answer)


def _is_finite_float(value: Any) -> bool:
    """Return whether a result is a reward as it is. `score` reads all other results."""
    return type(value) is float and math.isfinite(value)


def noted(source: object, reward: float) -> float:
    """Return a reward, after the current episode has taken the answer that it names."""
    if (episode := current_episode()) is not None:
        episode.take_answer(source, reward.answer if isinstance(reward, Reward) else None)
    return reward
