"""Prompts that a sampler chooses: their stream, and the way back of their rewards.

A row's number travels with it: in the item, then in the trajectories of its group. So it survives a checkpoint, and a
group that runs ahead of training or is filtered still tells its row. Neither workflows nor rewards see it.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from rlite.data.packs import first_rows
from rlite.data.prompts import Prompt, PromptStream, item_name
from rlite.data.rows import Rows
from rlite.data.source import Table
from rlite.errors import CallbackError, ConfigError, RliteError, own_traceback
from rlite.rollout import RolloutWorkflow
from rlite.trainer.callbacks import Callback
from rlite.trainer.rl.rollouts import Generated, trajectory_rewards
from rlite.trainer.sampling.sampler import PromptResult, PromptSampler
from rlite.types import AsyncInference

ROW = "sampler_row"
"""key of a row's number, in items and in batches"""


def sampled(
    callbacks: Sequence[Callback], rows: Rows, uniform: PromptStream, batch_size: int, seed: int
) -> PromptStream:
    """Return the stream of the sampler among the callbacks of a run; the uniform stream if there is none."""
    found = [each for each in callbacks if isinstance(each, PromptSampler)]
    if not found:
        return uniform
    names = ", ".join(type(each).__name__ for each in found)
    if len(found) > 1:
        raise ConfigError(f"several samplers of prompts ({names}): leave train_data.sampler or a callback out")
    if rows.stream is not None:
        raise ConfigError(f"the sampler {names} chooses among all rows, which train_data.streaming=true does not hold")
    return SampledPrompts(rows.rows, uniform, batch_size, found[0], seed)


class SampledPrompts(PromptStream):
    """Endless batches of the rows that a sampler chooses."""

    def __init__(self, rows: Table, uniform: PromptStream, batch_size: int, sampler: PromptSampler, seed: int) -> None:
        super().__init__(rows, batch_size, uniform.order)
        self.sampler = sampler
        self._lock = threading.Lock()
        self._pending: list[PromptResult] = []
        with blamed(sampler, "begin"):
            sampler.begin(rows, seed)

    def observe(self, results: Sequence[PromptResult]) -> None:
        """Keep results until the next choice. Safe in any thread."""
        with self._lock:
            self._pending += results

    def _take(self, count: int) -> list[Prompt]:
        if not count:
            return []
        with self._lock:
            results, self._pending = self._pending, []
        with blamed(self.sampler, "observe"):
            for result in results:
                self.sampler.observe(result)
        with blamed(self.sampler, "choose"):
            numbers = [int(number) for number in self.sampler.choose(count)]
        if len(numbers) != count or not all(0 <= number < len(self._rows) for number in numbers):
            expected = f"expected {count} numbers from 0 to {len(self._rows) - 1}"
            raise ConfigError(f"{type(self.sampler).__name__}.choose({count}) returned {numbers!r:.200}; {expected}")
        return [Prompt({**self._rows[n], ROW: n}, item_name(self._rows[n], n)) for n in numbers]

    def state_dict(self) -> dict[str, Any]:
        """Return a digest of the rows, and the results that the sampler has not observed yet."""
        with self._lock:
            return {**super().state_dict(), "pending": [[each.number, list(each.rewards)] for each in self._pending]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the results that were not observed. A checkpoint of the uniform order has none."""
        super().load_state_dict(state)
        self._pending = [PromptResult(number, tuple(rewards)) for number, rewards in state.get("pending", ())]

    def numbered(self, workflow: RolloutWorkflow) -> RolloutWorkflow:
        """Return a copy of a workflow whose trajectories have the number of their row."""
        own: Any = copy.copy(workflow)
        own.arun_episode = partial(_run_numbered, workflow)
        return own

    def generated(self) -> Generated:
        """Return a counter of trajectories that also observes them."""
        return ObservedGroups(self)


@contextmanager
def blamed(sampler: PromptSampler, method: str) -> Iterator[None]:
    """Name the sampler in an exception that its code raises inside of the block."""
    try:
        yield
    except RliteError:
        raise
    except Exception as error:  # a sampler may raise anything
        told = f"the sampler {type(sampler).__name__} raised {type(error).__name__} in {method}"
        raise CallbackError(f"{told}.\n{own_traceback(error)}") from error


def _run_numbered(workflow: RolloutWorkflow, engine: AsyncInference, data: dict[str, Any]) -> Awaitable[Any] | Any:
    number = data.pop(ROW, None)
    episode: Any = workflow.arun_episode(engine, data)
    return _with_number(episode, number) if inspect.isawaitable(episode) and number is not None else episode


async def _with_number(episode: Awaitable[Any], number: int) -> Any:
    rows = await episode
    if isinstance(rows, TensorDict):
        rows[ROW] = torch.full((len(rows),), number)
    return rows


class ObservedGroups(Generated):
    """Gathers the trajectories of a step, and lets a sampler observe each group, also one that a filter drops."""

    def __init__(self, prompts: SampledPrompts) -> None:
        super().__init__()
        self._prompts = prompts

    def add(self, batch: TensorDict, is_one_group: bool = False) -> None:
        """Count every trajectory of a batch, and observe its groups in their order."""
        super().add(batch, is_one_group)
        if ROW in batch:  # else it was made before the run had a sampler
            self._prompts.observe(results_of(batch, is_one_group))


def results_of(batch: TensorDict, is_one_group: bool = False) -> list[PromptResult]:
    """Return the rewards of each prompt of a batch, in the order of the groups."""
    first, rewards = first_rows(batch), trajectory_rewards(batch)
    numbers = batch[ROW][first]
    groups = torch.zeros_like(numbers) if is_one_group else batch["group_ids"][first]
    members = [groups == group for group in groups.unique()]
    return [PromptResult(int(numbers[own][0]), tuple(rewards[own].tolist())) for own in members]
