"""The source of a reinforcement-learning trainer's batches: generated in turns with training, or ahead of it.

The prompts of the command `rlite ppo`: tables in any known format, one or several that are mixed.

Dynamic filtering (DAPO, arXiv:2503.14476): groups whose rewards are all equal teach nothing and are replaced.

Metrics of everything that a step has generated, including trajectories that a filter has dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.batch import NAMED_REWARD, check_has, check_one_per_row
from rlite.data.prompts import Prompt, PromptStream
from rlite.data.rows import Rows, mixed_rows, read_source, streamed_source
from rlite.errors import StreamedDataError
from rlite.observability import stats_tracker
from rlite.rollout import RolloutWorkflow
from rlite.rollout.collector.group import plain
from rlite.rollout.trajectories import first_rows, join_batches, layout, trajectory_index
from rlite.trainer.held_out.options import held_out_sources
from rlite.trainer.rl.engines import Engines, check_kept
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.run.program_objects import NOTHING, ProgramObjects


def read_prompts(options: PpoConfig, given: ProgramObjects = NOTHING) -> tuple[Rows, dict[str, Rows]]:
    """Return the rows of train_data, and the rows of each set of test_data.

    Args:
        options: the run's config.
        given: rows of a program, in place of those of the paths.
    """
    data = options.train_data
    sources = {name: given.source(source) for name, source in data.sources("train_data").items()}
    if data.streaming:
        rows = streamed_source(sources[""], "prompts", data.shuffle_buffer)
    else:
        parts = {name: read_source(source, "prompts") for name, source in sources.items()}
        rows = mixed_rows(parts, data.weights) if data.mixture else parts[""]
    tests = held_out_sources(options.test_data, data.columns, data.system_prompt)
    return rows, {name: read_source(given.source(source), "prompts") for name, source in tests.items()}


SAID_ONCE = {"scores": "score", "num_turns": "turns", "num_tool_calls": "tool_calls", "num_tool_errors": "tool_errors"}
"""keys of a whole trajectory that workflows may write, each with the metric that its mean is"""
PERCENTILES = {"p50": 0.5, "p95": 0.95}


class Generated:
    """Gathers the trajectories of one step from each batch that was generated for it."""

    def __init__(self) -> None:
        self._parts: list[dict[str, Tensor]] = []

    def add(self, batch: TensorDict, is_one_group: bool = False) -> None:
        """Count every trajectory of a batch, by `group_ids` or all of them as one group. Safe in any thread."""
        first, index = first_rows(batch), trajectory_index(batch)
        zeros, rewards = torch.zeros(len(first)), _rewards(batch)
        groups = torch.zeros(len(first), dtype=torch.int64) if is_one_group else batch["group_ids"][first]
        part = {
            "reward": rewards,
            "response_length": zeros.index_add(0, index, batch["loss_mask"].sum(-1).float()),
            "uniform_groups": _are_uniform(rewards, groups),
        }
        # a user's workflow may leave these out
        if "truncated" in batch:
            part["truncated"] = zeros.index_add(0, index, batch["truncated"].float()) > 0
        names = {name: name for name in map(str, batch.keys()) if name.startswith(NAMED_REWARD)}
        part |= {name: batch[key][first] for key, name in (SAID_ONCE | names).items() if key in batch}
        self._parts.append(part)

    def metrics(self) -> dict[str, float]:
        """Return statistics of the trajectories since the last call.

        Means of all values, the spread of rewards and response lengths, and the share of groups with equal rewards
        among the groups of several trajectories.
        """
        parts, self._parts = self._parts, []
        keys = dict.fromkeys(key for part in parts for key in part)
        values = {key: torch.cat([part[key].double() for part in parts if key in part]) for key in keys}
        metrics = {key: value.nanmean().item() for key, value in values.items() if not value.isnan().all()}
        for key in ("reward", "response_length"):
            metrics |= {f"{key}_min": values[key].min().item(), f"{key}_max": values[key].max().item()}
        metrics["reward_std"] = values["reward"].std(correction=0).item()
        for name, share in PERCENTILES.items():
            metrics[f"response_length_{name}"] = values["response_length"].quantile(share).item()
        return metrics


def mean_reward(batch: TensorDict) -> float:
    """Return the mean reward of the trajectories of a batch."""
    return _rewards(batch).mean().item()


def _rewards(batch: TensorDict) -> Tensor:
    """Return the reward of each trajectory [M], also if it is given token by token."""
    rewards = batch["rewards"][first_rows(batch)].double()
    return rewards if rewards.dim() == 1 else rewards.sum(1)


def _are_uniform(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return for each group of several trajectories whether all its rewards are equal."""
    members = [rewards[groups == group] for group in groups.unique()]
    return torch.tensor([len(own.unique()) == 1 for own in members if len(own) > 1])


def replace_uniform_groups(
    batch: TensorDict, num_groups: int, generate: Callable[[int], TensorDict | None], max_rounds: int
) -> TensorDict:
    """Return a batch in which the rewards of each group differ, as far as such groups are found.

    Uniform groups, whose trajectories all have the same reward, are replaced, and so are lost groups. If some are still
    missing at the end, uniform groups fill the batch up.

    Args:
        batch: generated first.
        num_groups: groups that the result should have.
        generate: returns so many new groups, or None if all of them were lost.
        max_rounds: calls of `generate` at most.
    """
    kept, uniform, num_missing, num_dropped, rounds = [], [], num_groups, 0, 0
    found: TensorDict | None = batch
    while True:
        if found is not None and layout(found) == layout(batch):  # others cannot be joined
            is_varied = torch.isin(found["group_ids"], varied_groups(found))
            num_varied = len(found["group_ids"][is_varied].unique())
            kept.append(found[is_varied])
            uniform.append(found[~is_varied])
            num_missing -= num_varied
            num_dropped += len(found["group_ids"].unique()) - num_varied
        elif found is not None:
            num_odd = len(found["group_ids"].unique())
            stats_tracker.count(**{"rollout/num_lost": num_odd, "rollout/lost/unlike_the_first_batch": num_odd})
        if num_missing <= 0 or rounds == max_rounds:
            break
        rounds += 1
        found = generate(num_missing)
    if num_missing > 0 and num_dropped:
        spare = join_batches([part for part in uniform if len(part)])
        ids = list(dict.fromkeys(spare["group_ids"].tolist()))[:num_missing]
        kept.append(spare[torch.isin(spare["group_ids"], torch.tensor(ids))])
        num_dropped -= len(ids)
    stats_tracker.scalar(num_filtered=num_dropped, num_refills=rounds)
    return join_batches([part for part in kept if len(part)])


def varied_groups(batch: TensorDict) -> Tensor:
    """Return the ids of the groups whose trajectories have different rewards."""
    first = first_rows(batch)
    rewards, groups = batch["rewards"][first], batch["group_ids"][first]
    found = [int(group) for group in groups.unique() if len(rewards[groups == group].unique()) > 1]
    return torch.tensor(found, dtype=torch.int64)


def num_uniform(batch: TensorDict) -> int:
    """Return the number of groups whose trajectories all have the same reward."""
    return len(batch["group_ids"].unique()) - len(varied_groups(batch))


def is_varied(group: TensorDict) -> bool:
    """Return whether the trajectories of one group have different rewards."""
    return len(group["rewards"][first_rows(group)].unique()) > 1


class VariedGroups:
    """Accepts groups with different rewards, and every group once the budget of one batch is spent.

    Args:
        budget: groups that may be refused per batch.
        generated: counts the refused groups.
    """

    def __init__(self, budget: int, generated: Generated) -> None:
        self._budget = budget
        self._generated = generated
        self._num_refused = self._num_before = 0  # the first is written by the collector's thread alone

    def __call__(self, group: TensorDict) -> bool:
        """Return whether the group is accepted."""
        check_one_per_row(group, "rewards")
        if is_varied(group) or self._num_refused - self._num_before >= self._budget:
            return True
        self._num_refused += 1
        self._generated.add(group, is_one_group=True)
        return False

    def next_batch(self) -> int:
        """Return the number of refused groups, and begin with a new budget."""
        refused = self._num_refused - self._num_before
        self._num_before += refused
        return refused


TRAINED_ON = ("loss_mask", "logprobs", "rewards")
"""keys that a workflow must give a trajectory so that it can be trained on"""
BAD_DATA = "a row of its batch could not be used; its prompt is asked again when the run goes on"
NOT_AHEAD = "the run went on without rollouts ahead of training, and asked its prompt again"


class Rollouts:
    """Each batch is generated by the current policy, while nothing is trained.

    Args:
        options: the run's config.
        engines: their rollout engine generates.
        workflow: runs the episodes.
        prompts: yields the items.
    """

    def __init__(self, options: PpoConfig, engines: Engines, workflow: RolloutWorkflow, prompts: PromptStream) -> None:
        self._options, self._engines, self._workflow, self._prompts = options, engines, workflow, prompts
        self._generated = Generated()

    @stats_tracker.record_timing("rollout")
    def next_batch(self) -> TensorDict:
        """Return a batch that is generated and rewarded now, each prompt's responses side by side.

        Raises:
            StreamedDataError: a prompt cannot be used. The prompts before it are left for a later run.
        """
        data, rollout = self._options.train_data, self._options.rollout
        asked: list[Prompt] = []
        group_size = self._options.responses_per_prompt

        def generate(count: int) -> TensorDict | None:
            try:
                prompts = self._prompts.next(count)
            except StreamedDataError:
                self._prompts.returned[:0] = asked
                self._engines.rollout.collector.give_up_consumed(BAD_DATA)
                raise
            # at the end of an epoch a refill may ask a prompt again: another place draws another answer
            place = len(asked)
            asked.extend(prompts)
            collector = self._engines.rollout.collector
            batch = collector.collect(prompts, self._workflow, group_size, first_place=place).batch
            if batch is not None:
                self._check(batch)
                self._generated.add(batch)
            return batch

        while (batch := generate(data.prompts_per_rollout)) is None:
            continue  # the collector stops a run in which everything fails
        if self._options.has_dynamic_filtering:
            batch = replace_uniform_groups(batch, data.prompts_per_rollout, generate, rollout.max_refills)
            stats_tracker.scalar(num_unreplaced=num_uniform(batch))
        stats_tracker.scalar(**self._generated.metrics())
        return batch

    def _check(self, batch: TensorDict) -> None:
        check_has(batch, *TRAINED_ON)
        check_one_per_row(batch, "rewards")
        check_kept(batch, self._options.rollout, self._workflow)

    def state_dict(self) -> dict[str, Any]:
        """Return prompts that are left by an earlier run whose rollouts ran ahead, or by a batch that met a bad one."""
        groups = [{"data": plain(prompt, "a prompt"), "item": prompt.item} for prompt in self._prompts.returned]
        return {"groups": groups, **self._engines.rollout.collector.record_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin with the prompts that were under way. Groups of an earlier run that ran ahead are aborted."""
        self._prompts.returned = [Prompt(group["data"], group.get("item") or "") for group in state["groups"]]
        self._engines.rollout.collector.load_record_state(state, NOT_AHEAD)


class RolloutsAhead(Rollouts):
    """Prompts are answered while earlier batches are trained on, `rollout.max_head_offpolicyness` updates ahead."""

    def __init__(self, options: PpoConfig, engines: Engines, workflow: RolloutWorkflow, prompts: PromptStream) -> None:
        super().__init__(options, engines, workflow, prompts)
        budget = options.rollout.max_refills * options.train_data.prompts_per_rollout
        self._filter = VariedGroups(budget, self._generated) if options.has_dynamic_filtering else None

    @stats_tracker.record_timing("rollout")
    def next_batch(self) -> TensorDict:
        """Return the oldest groups, as soon as they are ready."""
        batch = self._engines.rollout.prepare_batch(
            self._prompts, self._workflow, should_accept=self._filter, group_size=self._options.responses_per_prompt
        )
        self._check(batch)
        if self._filter is not None:
            stats_tracker.scalar(num_filtered=self._filter.next_batch(), num_unreplaced=num_uniform(batch))
        self._generated.add(batch)
        stats_tracker.scalar(**self._generated.metrics())
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the groups that run ahead, finished or not."""
        return self._engines.rollout.collector.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the groups; an earlier run that did not run ahead has left prompts at most."""
        if "ledger" in state:
            self._engines.rollout.collector.load_state_dict(state, self._workflow, self._filter)
        else:
            super().load_state_dict(state)


def make_rollouts(options: PpoConfig, engines: Engines, workflow: RolloutWorkflow, prompts: PromptStream) -> Rollouts:
    """Return the source of batches: they are generated in turns with training, or ahead of it.

    Args:
        options: `rollout.max_head_offpolicyness` chooses between the two.
        engines: their rollout engine generates.
        workflow: runs the episodes.
        prompts: yields the items.
    """
    kind = RolloutsAhead if options.rollout.max_head_offpolicyness else Rollouts
    return kind(options, engines, workflow, prompts)
