"""A group: the episodes of one submitted item, and what is kept of it over a restart."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict

from rlite.errors import DataError
from rlite.rollout.collector.episodes import EpisodeFailed
from rlite.rollout.collector.ledger import RolloutLedger
from rlite.rollout.trajectories import check_alike, layout
from rlite.rollout.workflow import RolloutWorkflow

Item = Mapping[str, Any]
ShouldAccept = Callable[[TensorDict], bool]


@dataclass(eq=False, slots=True)
class Group:
    """One submitted item. `trajectories` when accepted, `reason` when lost."""

    id: int
    data: Item
    workflow: RolloutWorkflow
    size: int
    should_accept: ShouldAccept | None = None
    seed: int | None = None
    version: int | None = None
    """at its start"""
    place: int | None = None
    """in the order of the starts; None if it only measures, and failures do not stop the run"""
    started: float | None = None
    task: asyncio.Task[None] | None = None
    trajectories: list[TensorDict] | None = None
    reason: str | None = None
    error: BaseException | None = None
    tokens: Counter[int] = field(default_factory=Counter)
    """generated so far, by sample"""

    @property
    def age(self) -> int | None:
        """The version of its oldest token; if the trajectories do not say, that at its start."""
        known = oldest_version(self.trajectories or ())
        return self.version if known is None else known

    @property
    def has_ended(self) -> bool:
        return self.trajectories is not None or self.reason is not None

    def __str__(self) -> str:
        state = "waiting" if self.started is None else f"running for {time.monotonic() - self.started:.1f} s"
        return f"group {self.id} ({state})"

    def state_dict(self) -> dict[str, Any]:
        """All but the workflow, as plain values and tensors. Raises: DataError for an item that holds other things."""
        rows = self.trajectories
        return {
            "id": self.id,
            "data": plain(self.data, f"the item of group {self.id}"),
            "size": self.size,
            "seed": self.seed,
            "version": self.version,
            "trajectories": None if rows is None else [dict(row.items()) for row in rows],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], workflow: RolloutWorkflow, accept: ShouldAccept | None) -> Group:
        rows = state["trajectories"]
        trajectories = None if rows is None else [TensorDict(row, batch_size=[len(row["input_ids"])]) for row in rows]
        return cls(
            state["id"],
            state["data"],
            workflow,
            state["size"],
            should_accept=accept,
            seed=state["seed"],
            version=state.get("version"),
            trajectories=trajectories,
            tokens=Counter(dict(enumerate(response_lengths(trajectories or ())))),
        )


class Lane:
    """Groups under one rule of admission; `groups` has those that wait, run or are ready."""

    def __init__(self, ledger: RolloutLedger) -> None:
        self.ledger = ledger
        self.groups: dict[int, Group] = {}

    def unfinished(self) -> list[Group]:
        return [group for group in self.groups.values() if not group.has_ended]


def check_siblings(trajectories: Sequence[TensorDict]) -> None:
    """Raise EpisodeFailed unless the episodes of one group fit into one batch."""
    try:
        check_alike(trajectories)
    except DataError as error:
        raise EpisodeFailed(error) from error


def misfits(groups: Sequence[Group]) -> list[tuple[Group, str]]:
    """The groups that do not fit into one batch with most of these, each with the reason."""
    layouts = [layout(group.trajectories[0]) if group.trajectories else frozenset() for group in groups]
    common = Counter(layouts).most_common(1)[0][0]
    return [
        (group, f"unlike the others of its batch in {', '.join(sorted({key for key, *_ in own ^ common}))}")
        for group, own in zip(groups, layouts, strict=True)
        if own != common
    ]


def oldest_version(trajectories: Sequence[TensorDict]) -> int | None:
    """The version that made the oldest token; None if the trajectories do not say."""
    made = [row["versions"][row["versions"] >= 0] for row in trajectories if "versions" in row]
    known = [int(versions.min()) for versions in made if len(versions)]
    return min(known) if known else None


def response_lengths(trajectories: Sequence[TensorDict]) -> list[int]:
    """Tokens that were generated, of each row."""
    return [int(length) for row in trajectories if "loss_mask" in row for length in row["loss_mask"].sum(-1)]


def plain(value: Any, where: str) -> Any:
    """A copy made of dicts, lists, tensors, texts, numbers, booleans and None alone; NumPy's become those.

    Raises: DataError that says where something else was found.
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
