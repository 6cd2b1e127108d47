"""Groups that have ended, as a collector hands them to its callers and to a record."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from rlite.rollout.episode import Episode
from rlite.types import Status

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rlite.rollout.collector.runner import Group


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
    first_sample: int = 0
    """number of the first episode among those of the item"""
    columns: Mapping[str, str] = field(default_factory=dict)
    """columns of the data item, shortened"""

    @classmethod
    def of(cls, group: Group, status: Status | None, reason: str = "") -> Ended:
        """Return what a record needs of a group.

        `status`: status of the group; None if it was consumed.
        """
        return cls(group.id, group.item, status, reason, group.episodes, group.first_sample, short_columns(group.data))


def evaluated(group: Group, number: int, group_size: int) -> Ended:
    """Return an episode of an evaluation.

    `number`: place of the episode among all.
    """
    loss = group.loss
    ended = Ended.of(group, "evaluated") if loss is None else Ended.of(group, loss.status, loss.reason)
    return replace(ended, group=number // group_size)


@dataclass(frozen=True)
class Collected:
    """The finished groups of one call as a batch, and the lost ones by reason."""

    batch: TensorDict | None
    """rows of the finished groups; None if there are none"""
    num_groups: int
    """groups that were asked for"""
    lost: Counter[str]
    """groups that were lost, by reason"""
    error: BaseException | None = None
    """the exception behind one of the losses"""


def seconds(episode: Episode, *names: str) -> float:
    """Return the time in which spans of these names were open; overlapping spans count once."""
    total = end = 0.0
    for _, began, ended in sorted((span for span in list(episode.spans) if span[0] in names), key=lambda span: span[1]):
        total += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return total


MAX_COLUMNS = 16
MAX_NAME = 100
MAX_VALUE = 300
"""characters of a value"""
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = MAX_VALUE


def short_columns(item: Mapping[str, Any]) -> dict[str, str]:
    """Return the first columns of a data item but its `id`, cut to a few hundred characters each.

    `item`: a row of the data; its values may be of any type and size.
    """
    names = islice((name for name in item if name != "id"), MAX_COLUMNS)
    return {str(name)[:MAX_NAME]: _short(item[name])[:MAX_VALUE] for name in names}


def _short(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value) if value is None or isinstance(value, bool | int | float) else _REPR.repr(value)
