"""Groups, and the queues that hold them."""

from __future__ import annotations

import asyncio
import json
import reprlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from tensordict import TensorDict

from rlite.errors import CheckpointError, DataError
from rlite.observability import trace
from rlite.rollout.collector.ledger import RolloutLedger
from rlite.rollout.episode import Episode
from rlite.rollout.trajectories import from_columns
from rlite.rollout.workflow import RolloutWorkflow
from rlite.services.record.schema import Status


@dataclass(frozen=True, eq=False, slots=True)
class Ended:
    """A group that was lost or consumed, or that is under way at the end of a run. Its episodes may still run."""

    group: int
    item: str
    """name of the data item"""
    status: Status | None
    """None: consumed; the consumer sets it"""
    reason: str
    """why the group is lost"""
    episodes: list[Episode]
    num_tokens: dict[int, int]
    """tokens that each episode has generated, by its number"""
    first_sample: int = 0
    """number of the first episode among those of the item"""
    columns: Mapping[str, str] = field(default_factory=dict)
    """columns of the data item, shortened"""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        return {
            "group": self.group,
            "item": self.item,
            "status": self.status,
            "reason": self.reason,
            "num_tokens": dict(self.num_tokens),
            "columns": dict(self.columns),
            "episodes": [
                {
                    **episode.state_dict(),
                    "trajectory": None if episode.trajectory is None else dict(episode.trajectory.items()),
                }
                for episode in self.episodes
            ],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Ended:
        """Return the group that was saved."""
        return cls(
            **{name: state[name] for name in ("group", "item", "status", "reason")},
            episodes=[Episode.from_state(each, each["trajectory"]) for each in state["episodes"]],
            num_tokens=dict(state["num_tokens"]),
            columns=state.get("columns", {}),
        )


MAX_COLUMNS = 16
MAX_NAME = 100
MAX_VALUE = 300
"""characters of a value"""
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = MAX_VALUE


def short_columns(item: Mapping[str, Any]) -> dict[str, str]:
    """Return the first columns of a data item but its `id`, cut to a few hundred characters each.

    Args:
        item: a row of the data; its values may be of any type and size.
    """
    names = islice((name for name in item if name != "id"), MAX_COLUMNS)
    return {str(name)[:MAX_NAME]: _short(item[name])[:MAX_VALUE] for name in names}


def _short(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value) if value is None or isinstance(value, bool | int | float) else _REPR.repr(value)


Item = Mapping[str, Any]
ShouldAccept = Callable[[TensorDict], bool]


@dataclass(eq=False, slots=True)
class Group:
    """The episodes of one submitted item. The ledger's module draws a group's life."""

    id: int
    """unique in its collector; batches carry it as `group_ids`"""
    data: Item
    """the submitted item"""
    workflow: RolloutWorkflow
    size: int
    """number of episodes"""
    should_accept: ShouldAccept | None = None
    """decides whether the finished group is kept"""
    seed: int | None = None
    """key of the group's random numbers; None leaves them to the order of requests"""
    version: int | None = None
    """policy version at the group's start"""
    start_order: int | None = None
    """number of groups for training that started before this group; None for an evaluation"""
    started: float | None = None
    """`time.monotonic()` at the group's start, in seconds"""
    task: asyncio.Task[None] | None = None
    """runs the episodes"""
    trajectories: list[TensorDict] | None = None
    """one per episode, as soon as the group is ready"""
    reason: str | None = None
    """why the group is lost"""
    error: BaseException | None = None
    """the exception behind `reason`"""
    tokens: Counter[int] = field(default_factory=Counter)
    """tokens generated so far, by episode"""
    num_finished: int = 0
    """episodes that have ended"""
    item: str = ""
    """name of the item in records"""
    first_sample: int = 0
    """number of the first episode among those of the item"""
    episodes: list[Episode] = field(init=False)

    def __post_init__(self) -> None:
        submitted = time.monotonic()
        self.episodes = [Episode(submitted) for _ in range(self.size)]

    @property
    def age(self) -> int | None:
        """Version of the oldest token; the version at the start if the trajectories have no `versions`."""
        made = [row["versions"][row["versions"] >= 0] for row in self.trajectories or () if "versions" in row]
        return min((int(versions.min()) for versions in made if len(versions)), default=self.version)

    @property
    def has_ended(self) -> bool:
        """True as soon as the group is ready or lost."""
        return self.trajectories is not None or self.reason is not None

    def ended(self, status: Status | None, reason: str = "") -> Ended:
        """Return what a record needs.

        Args:
            status: status of the group; None if it was consumed.
            reason: why it is lost.
        """
        columns = short_columns(self.data)
        return Ended(self.id, self.item, status, reason, self.episodes, self.tokens, self.first_sample, columns)

    @property
    def redrawn(self) -> str:
        """Kind of the failure after which an episode drew other answers; empty if none did."""
        return next((episode.redrawn for episode in self.episodes if episode.redrawn), "")

    def __str__(self) -> str:
        state = "waiting" if self.started is None else f"running for {time.monotonic() - self.started:.1f} s"
        return f"group {self.id} ({state})"

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the workflow, as plain values and tensors.

        Raises:
            DataError: The item holds something else.
        """
        rows = self.trajectories
        return {
            "id": self.id,
            "data": plain(self.data, f"the item of group {self.id}"),
            "size": self.size,
            "seed": self.seed,
            "version": self.version,
            "item": self.item,
            "episodes": [episode.state_dict() for episode in self.episodes],
            "trajectories": None if rows is None else [dict(row.items()) for row in rows],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], workflow: RolloutWorkflow, accept: ShouldAccept | None) -> Group:
        """Return the group that was saved.

        Args:
            state: what `state_dict` returned.
            workflow: runs the group, if it was not finished.
            accept: decides whether the group is kept.
        """
        group = cls(state["id"], state["data"], workflow, state["size"], accept, state["seed"], state.get("version"))
        group.item = state.get("item", "")
        if (rows := state["trajectories"]) is not None:
            group.trajectories = [from_columns(row) for row in rows]
            group.tokens.update(dict(enumerate(response_lengths(group.trajectories))))
            if kept := state.get("episodes"):
                group.episodes = [Episode.from_state(episode, row) for episode, row in zip(kept, rows, strict=True)]
        return group


class Queue:
    """Groups under one rule of admission: those that wait, run or are ready, in the order of their submission.

    The ledger decides by number; the queue keeps the groups behind the numbers.

    Args:
        ledger: admits the groups.
        is_training: whether the groups are trained on. If not, lost groups are not reported and stop no run.
    """

    def __init__(self, ledger: RolloutLedger, is_training: bool = True) -> None:
        self.ledger = ledger
        self.is_training = is_training
        self.groups: dict[int, Group] = {}
        self.failed_attempts: Counter[str] = Counter()
        """attempts at an episode that raised, by the exception's name or the reward's outcome"""

    def submit(self, group: Group) -> None:
        """Let a group wait."""
        self.groups[group.id] = group
        self.ledger.submit(group.id)
        trace.stage("group", group.id, "waiting")

    def start(self, version: int) -> Group:
        """Return the group that has waited longest, which runs from now on."""
        group = self.groups[self.ledger.start(version)]
        trace.stage("group", group.id, "running")
        group.started, group.version = time.monotonic(), version
        return group

    def accept(self, group: Group, trajectories: list[TensorDict]) -> None:
        """Mark a running group as ready."""
        trace.stage("group", group.id, "ready")
        group.trajectories = trajectories
        self.ledger.accept(group.id, group.age)

    def drop(self, group: Group, reason: str, error: BaseException | None = None) -> None:
        """Mark a group as lost.

        Args:
            group: waits, runs or is ready.
            reason: why it is lost.
            error: the exception behind the reason.
        """
        trace.finish("group", group.id, reason)
        self.ledger.drop(group.id, reason)
        del self.groups[group.id]
        group.reason, group.error, group.trajectories = reason, error, None

    def consume(self, groups: Sequence[Group], version: int) -> None:
        """Remove ready groups that go into a batch at this policy version."""
        self.ledger.consume([group.id for group in groups], version)
        for group in groups:
            trace.finish("group", group.id, "consumed")
            del self.groups[group.id]

    def unfinished(self) -> list[Group]:
        """Return the groups that wait or run."""
        return [group for group in self.groups.values() if not group.has_ended]

    def state_dict(self) -> dict[str, Any]:
        """Return all groups and counts, as plain values and tensors."""
        return {
            "batch_size": self.ledger.batch_size,
            "ledger": self.ledger.state_dict(),
            "failed_attempts": dict(self.failed_attempts),
            "groups": [group.state_dict() for group in self.groups.values()],
        }

    def load_state_dict(
        self, state: Mapping[str, Any], workflow: RolloutWorkflow, accept: ShouldAccept | None, version: int
    ) -> None:
        """Restore the groups: finished ones are ready, the others wait to run again.

        Args:
            state: what `state_dict` returned.
            workflow: runs the unfinished groups.
            accept: decides whether they are kept.
            version: current policy version, the age of a finished group that does not know its own.

        Raises:
            CheckpointError: The queue holds groups already, or has another batch size.
        """
        size, saved = self.ledger.batch_size, state["batch_size"]
        if size is not None and saved not in (None, size):
            raise CheckpointError(
                f"the rollouts under way were made for batches of {saved} groups, this run has "
                f"consumer_batch_size={size}: resume with consumer_batch_size={saved}"
            )
        if self.groups:
            raise CheckpointError("load_state_dict: this collector has groups under way; use one that is new")
        self.ledger.batch_size = saved
        self.ledger.load_state_dict(state["ledger"])
        self.failed_attempts = Counter(state["failed_attempts"])
        for kept in state["groups"]:
            group = self.groups[kept["id"]] = Group.from_state(kept, workflow, accept)
            if group.trajectories is None:
                self.ledger.submit(group.id)
            else:
                self.ledger.restore_ready(group.id, version if group.age is None else group.age)


def aborted(state: Mapping[str, Any], reason: str) -> Ended:
    """Return a group that was saved and does not go on, as its episodes were when it was saved.

    Args:
        state: what `Group.state_dict` returned.
        reason: why it does not go on.
    """
    rows = state["trajectories"] or [None] * state["size"]
    episodes = [Episode.from_state(kept, row) for kept, row in zip(state["episodes"], rows, strict=True)]
    return Ended(state["id"], state["item"], "aborted", reason, episodes, {}, columns=short_columns(state["data"]))


def response_lengths(trajectories: Sequence[TensorDict]) -> list[int]:
    """Return the number of generated tokens of each row."""
    return [int(length) for row in trajectories if "loss_mask" in row for length in row["loss_mask"].sum(-1)]


def plain(value: Any, where: str) -> Any:
    """Return a copy made of dicts, lists, tensors, texts, numbers, booleans and None. NumPy's values are converted.

    Raises:
        DataError: The value holds something else; the message says where.
    """
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
    raise DataError(
        f"{where} holds {type(value).__name__}, which a checkpoint cannot keep: expected texts, numbers, lists, "
        "mappings, arrays or tensors"
    )


def _plain_key(key: Any, where: str) -> Any:
    key = plain(key, f"{where}, a key")
    if isinstance(key, list | torch.Tensor):
        raise DataError(f"{where} has the key {key!r}, which a checkpoint cannot keep: expected a text or a number")
    return key


@dataclass(frozen=True)
class RolloutProgress:
    """Counts of the episodes that a call waits for."""

    what: str
    """ "rollout" or "evaluation" """
    num_episodes: int
    """episodes of the call"""
    num_finished: int
    """episodes that have ended, lost ones included"""
    num_tokens: int
    """tokens generated so far"""

    @classmethod
    def of(cls, what: str, groups: Sequence[Group], num_episodes: int) -> RolloutProgress:
        """Return the counts of groups, which may run meanwhile.

        Args:
            what: "rollout" or "evaluation".
            groups: groups of the call.
            num_episodes: episodes that the call waits for.
        """
        finished = sum(group.size if group.has_ended else group.num_finished for group in groups)
        num_tokens = sum(sum(list(group.tokens.values())) for group in groups)  # the list is copied in one step
        return cls(what, num_episodes, min(finished, num_episodes), num_tokens)

    def __str__(self) -> str:
        return f"{self.what}: {self.num_finished} of {self.num_episodes} episodes, {self.num_tokens:,} tokens"
