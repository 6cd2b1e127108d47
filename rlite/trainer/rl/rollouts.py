"""Where the batches of a reinforcement-learning trainer come from: made when asked for, or running ahead."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.progress import track
from tensordict import TensorDict

from rlite.data.prompts import PromptStream
from rlite.errors import DataError
from rlite.observability import stats_tracker
from rlite.rollout import RolloutWorkflow
from rlite.rollout.collector.group import plain
from rlite.trainer.rl.config import PpoConfig
from rlite.trainer.rl.engines import Engines
from rlite.trainer.rl.filtering import is_varied, replace_uniform_groups
from rlite.trainer.rl.generated import Generated

MANY_ROWS = 10_000
"""from which on a progress bar is worth its line"""


class AnyRollouts(Protocol):
    """What the trainer's loop asks for."""

    def next_batch(self) -> TensorDict: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class SynchronousRollouts:
    """Each batch is made by the current policy, while nothing is trained."""

    def __init__(self, options: PpoConfig, engines: Engines, workflow: RolloutWorkflow, prompts: PromptStream) -> None:
        self._options, self._engines, self._workflow, self._prompts = options, engines, workflow, prompts
        self._left: list[Mapping[str, Any]] = []

    @stats_tracker.record_timing("rollout")
    def next_batch(self) -> TensorDict:
        """Generate and reward a batch: each prompt's responses side by side."""
        data, rollout, num_asked = self._options.train_data, self._options.rollout, 0
        generated = Generated()
        group_size = self._options.responses_per_prompt

        def generate(count: int) -> TensorDict | None:
            nonlocal num_asked
            # where an epoch ends a refill may ask a prompt again, which is to be answered otherwise
            place, num_asked = num_asked, num_asked + count
            collector = self._engines.rollout.collector
            batch = collector.collect(self._next(count), self._workflow, group_size, first_place=place).batch
            if batch is not None:
                generated.add(batch)
            return batch

        while (batch := generate(data.prompts_per_rollout)) is None:
            continue  # what goes on failing, the collector stops
        if self._options.has_dynamic_filtering:
            batch = replace_uniform_groups(batch, data.prompts_per_rollout, generate, rollout.max_refills)
        stats_tracker.scalar(**generated.metrics())
        return batch

    def _next(self, count: int) -> list[Mapping[str, Any]]:
        left, self._left = self._left[:count], self._left[count:]
        return left + self._prompts.next(count - len(left))

    def state_dict(self) -> dict[str, Any]:
        """Nothing is under way between two steps, but what a run that ran ahead has left."""
        return {"groups": [{"data": plain(item, "a prompt")} for item in self._left]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Prompts that were under way in a run that ran ahead come first."""
        self._left = [group["data"] for group in state["groups"]]


class RolloutsAhead:
    """Prompts are answered while earlier batches are trained on, `rollout.max_head_offpolicyness` updates ahead."""

    def __init__(self, options: PpoConfig, engines: Engines, workflow: RolloutWorkflow, prompts: PromptStream) -> None:
        self._options, self._engines, self._workflow = options, engines, workflow
        self._batches = _Batches(prompts)
        budget = options.rollout.max_refills * options.train_data.prompts_per_rollout
        self._generated = Generated()
        self._filter = VariedGroups(budget, self._generated) if options.has_dynamic_filtering else None

    @stats_tracker.record_timing("rollout")
    def next_batch(self) -> TensorDict:
        """The oldest groups that are ready; waits for them."""
        batch = self._engines.rollout.prepare_batch(
            self._batches,
            self._workflow,
            should_accept=self._filter,
            group_size=self._options.responses_per_prompt,
        )
        if self._filter is not None:
            stats_tracker.scalar(num_filtered=self._filter.next_batch())
        self._generated.add(batch)
        stats_tracker.scalar(**self._generated.metrics())
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Groups that run ahead, finished or not."""
        return self._engines.rollout.collector.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them; of a run that did not run ahead there are but prompts, if any."""
        if "ledger" in state:
            self._engines.rollout.collector.load_state_dict(state, self._workflow, self._filter)
        else:
            self._batches.left = [group["data"] for group in state["groups"]]


class VariedGroups:
    """Accepts groups from which something can be learnt, and all of them when so many in one batch were refused.

    Those that it refuses count among what was `generated`.
    """

    def __init__(self, budget: int, generated: Generated) -> None:
        self._budget = budget
        self._generated = generated
        self._num_refused = 0

    def __call__(self, group: TensorDict) -> bool:
        if is_varied(group) or self._num_refused >= self._budget:
            return True
        self._num_refused += 1
        self._generated.add(group, is_one_group=True)
        return False

    def next_batch(self) -> int:
        """Begin with a new budget; returns how many were refused."""
        refused, self._num_refused = self._num_refused, 0
        return refused


class _Batches:
    """A prompt stream as a loader."""

    def __init__(self, prompts: PromptStream) -> None:
        self._prompts = prompts
        self.left: list[Mapping[str, Any]] = []
        """prompts that come first"""

    def __iter__(self) -> Iterator[list[Mapping[str, Any]]]:
        while True:
            if self.left:
                left, self.left = self.left, []
                yield left
            yield self._prompts.next()


def check_openings(rows: Sequence[Mapping[str, Any]], workflow: RolloutWorkflow, max_length: int, where: str) -> int:
    """Return the length of the longest prompt in tokens, as far as prompts are known before; 0 if none is.

    Raises: DataError, naming the row, if the chat template refuses its prompt, or the prompt leaves no room for an
        answer in `max_length` tokens.
    """
    longest = 0
    console = Console(file=sys.stderr)
    is_quiet = len(rows) < MANY_ROWS or not console.is_terminal
    for number, row in enumerate(
        track(rows, f"looking at the prompts of {where}", console=console, transient=True, disable=is_quiet)
    ):
        try:
            opening = workflow.opening(row)
        except DataError as error:
            raise DataError(f"{where}, row index {number}: {error}") from error
        longest = max(longest, len(opening or ()))
        if longest >= max_length:
            raise DataError(
                f"{where}, row index {number}: its prompt has {longest} tokens, which leaves no room for an answer in "
                f"{max_length} (the least of max_length_per_device x tp_size x sp_size of the models, "
                "the models' max_position_embeddings, and rollout.max_model_len); raise those, or drop the row"
            )
    return longest


def find_rollouts(
    options: PpoConfig, engines: Engines, workflow: RolloutWorkflow, prompts: PromptStream
) -> AnyRollouts:
    """Ahead if `rollout.max_head_offpolicyness` allows it."""
    kind = RolloutsAhead if options.rollout.max_head_offpolicyness else SynchronousRollouts
    return kind(options, engines, workflow, prompts)
