"""The items that groups are made of: their check, and a loader of them that does not end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlite.errors import ConfigError, DataError
from rlite.rollout.workflow import RolloutWorkflow


def check_items(items: Sequence[Any], workflow: Any, group_size: int) -> None:
    """Raise ConfigError or DataError unless groups can be made of these."""
    if not isinstance(workflow, RolloutWorkflow):
        raise ConfigError(f"workflow={workflow!r}: expected an instance of a RolloutWorkflow")
    if group_size < 1:
        raise ConfigError(f"group_size={group_size}: expected at least 1")
    if not len(items):
        raise DataError("the batch of data items is empty; expected at least one")
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise DataError(f"data item {index} is {type(item).__name__}: expected a mapping")


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield what a loader yields, again and again. Raises: DataError if it yields nothing."""
    while True:
        is_empty = True
        for items in loader:
            is_empty = False
            yield items
        if is_empty:
            raise DataError("the loader has nothing (more) to yield; give one that can be iterated again")
