"""Rollouts that run ahead of training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tensordict import TensorDict

from rlite.observability import stats_tracker
from rlite.trainer.rl.filtering import VariedGroups, num_uniform
from rlite.trainer.rl.rollouts import Rollouts


class RolloutsAhead(Rollouts):
    """Prompts are answered while earlier batches are trained on, `rollout.max_head_offpolicyness` updates ahead."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        budget = self._options.max_refills * self._num_prompts
        refused = partial(self._generated.add, is_one_group=True)
        self._filter = VariedGroups(budget, refused) if self._is_filtering else None

    @stats_tracker.record_timing("rollout")
    def next_batch(self) -> TensorDict:
        """Return the oldest groups, as soon as they are ready."""
        batch = self._engine.prepare_batch(
            self._prompts, self._workflow, should_accept=self._filter, group_size=self._group_size
        )
        self._check(batch)
        if self._filter is not None:
            stats_tracker.scalar(num_filtered=self._filter.next_batch(), num_unreplaced=num_uniform(batch))
        self._generated.add(batch)
        stats_tracker.scalar(**self._generated.metrics())
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the groups that run ahead, finished or not."""
        return self._engine.collector.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the groups; an earlier run that did not run ahead has left prompts at most."""
        if "ledger" in state:
            self._engine.collector.load_state_dict(state, self._workflow, self._filter)
        else:
            super().load_state_dict(state)
