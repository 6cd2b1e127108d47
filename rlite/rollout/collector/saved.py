"""Groups as plain values and tensors, for checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

from rlite.errors import CheckpointError, DataError
from rlite.rollout.collector.ended import Ended, short_columns
from rlite.rollout.collector.runner import Group, Queue, ShouldAccept
from rlite.rollout.draws import AttemptHistory
from rlite.rollout.episode import Episode
from rlite.rollout.workflow import RolloutWorkflow

PLAIN = ("started", "ended", "ended_at", "failure", "redrawn", "answer")
"""attributes of an episode that are saved as they are"""
OF_ENDED = ("group", "item", "status", "reason")
"""attributes of a group that has ended that are saved as they are"""


def episode_state(episode: Episode) -> dict[str, Any]:
    """Return everything but the trajectory, as plain values."""
    return {
        **{name: getattr(episode, name) for name in PLAIN},
        "spans": [list(span) for span in list(episode.spans)],
        "failed_attempts": list(episode.failed_attempts),
        "attempt": episode.attempt.state_dict(),
    }


def saved_episode(state: Mapping[str, Any], trajectory: Mapping[str, Any] | None, num_tokens: int = 0) -> Episode:
    """Return the episode that was saved."""
    episode = Episode(time.monotonic())
    vars(episode).update({name: state[name] for name in PLAIN if name in state}, num_tokens=num_tokens)
    episode.spans = [(name, began, ended) for name, began, ended in state["spans"]]
    episode.trajectory = None if trajectory is None else _from_columns(trajectory)
    episode.failed_attempts = state.get("failed_attempts", [])
    episode.attempt = AttemptHistory.from_state(state.get("attempt", ()))
    return episode


def ended_state(ended: Ended) -> dict[str, Any]:
    """Return a group that has ended as plain values and tensors."""
    episodes = [
        {**episode_state(each), "trajectory": None if each.trajectory is None else dict(each.trajectory.items())}
        for each in ended.episodes
    ]
    own = {name: getattr(ended, name) for name in OF_ENDED}
    num_tokens = {number: each.num_tokens for number, each in enumerate(ended.episodes)}
    return {**own, "num_tokens": num_tokens, "columns": dict(ended.columns), "episodes": episodes}


def saved_ended(state: Mapping[str, Any]) -> Ended:
    """Return the group that was saved."""
    numbers, saved = state["num_tokens"], enumerate(state["episodes"])
    episodes = [saved_episode(each, each["trajectory"], numbers.get(number, 0)) for number, each in saved]
    return Ended(**{name: state[name] for name in OF_ENDED}, episodes=episodes, columns=state.get("columns", {}))


def group_state(group: Group) -> dict[str, Any]:
    """Return everything but the workflow, as plain values and tensors."""
    rows = group.trajectories
    return {
        "id": group.id,
        "data": plain(group.data, f"the item of group {group.id}"),
        **{name: getattr(group, name) for name in ("size", "seed", "version", "item")},
        "episodes": [episode_state(episode) for episode in group.episodes],
        "trajectories": None if rows is None else [dict(row.items()) for row in rows],
    }


def saved_group(state: Mapping[str, Any], workflow: RolloutWorkflow, accept: ShouldAccept | None) -> Group:
    """Return the group that was saved."""
    group = Group(state["id"], state["data"], workflow, state["size"], accept, state["seed"], state.get("item", ""))
    group.version = state.get("version")
    if (rows := state["trajectories"]) is not None:
        group.trajectories = [_from_columns(row) for row in rows]
        if kept := state.get("episodes"):
            group.episodes = [saved_episode(episode, row) for episode, row in zip(kept, rows, strict=True)]
        for episode, row in zip(group.episodes, group.trajectories, strict=True):
            episode.num_tokens = int(row["loss_mask"].sum()) if "loss_mask" in row else 0
    return group


def aborted(state: Mapping[str, Any], reason: str) -> Ended:
    """Return a group that was saved and does not go on, as its episodes were when it was saved."""
    rows = state["trajectories"] or [None] * state["size"]
    episodes = [saved_episode(kept, row) for kept, row in zip(state["episodes"], rows, strict=True)]
    return Ended(state["id"], state["item"], "aborted", reason, episodes, columns=short_columns(state["data"]))


def queue_state(queue: Queue) -> dict[str, Any]:
    """Return all groups and counts, as plain values and tensors."""
    return {
        "batch_size": queue.ledger.batch_size,
        "ledger": queue.ledger.state_dict(),
        "groups": [group_state(group) for group in queue.groups.values()],
    }


def restore_queue(
    queue: Queue, state: Mapping[str, Any], workflow: RolloutWorkflow, accept: ShouldAccept | None, version: int
) -> None:
    """Restore the groups of a queue: finished ones are ready, the others wait to run again."""
    size, saved = queue.ledger.batch_size, state["batch_size"]
    if size is not None and saved not in (None, size):
        told = f"this run has consumer_batch_size={size}: resume with consumer_batch_size={saved}"
        raise CheckpointError(f"the rollouts under way were made for batches of {saved} groups, {told}")
    if queue.groups:
        raise CheckpointError("load_state_dict: this collector has groups under way; use one that is new")
    queue.ledger.batch_size = saved
    queue.ledger.load_state_dict(state["ledger"])
    for kept in state["groups"]:
        group = queue.groups[kept["id"]] = saved_group(kept, workflow, accept)
        if group.trajectories is None:
            queue.ledger.submit(group.id)
        else:
            queue.ledger.restore_ready(group.id, version if group.age is None else group.age)


def plain(value: Any, where: str) -> Any:
    """Return a copy made of dicts, lists, tensors, texts, numbers, booleans and None. NumPy's values are converted."""
    if isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "tolist"):  # an array or a scalar of NumPy; some of those are floats and texts, too
        return plain(value.tolist(), where)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {_plain_key(key, where): plain(entry, f"{where}, key {key!r}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, f"{where}, entry {index}") for index, entry in enumerate(value)]
    expected = "expected texts, numbers, lists, mappings, arrays or tensors"
    raise DataError(f"{where} holds {type(value).__name__}, which a checkpoint cannot keep: {expected}")


def _plain_key(key: Any, where: str) -> Any:
    key = plain(key, f"{where}, a key")
    if isinstance(key, list | torch.Tensor):
        raise DataError(f"{where} has the key {key!r}, which a checkpoint cannot keep: expected a text or a number")
    return key


def _from_columns(columns: Mapping[str, Any]) -> TensorDict:
    """Return a trajectory that was saved as a mapping of its columns."""
    return TensorDict(dict(columns), batch_size=[len(columns["input_ids"])])
