"""Objects that a program gives a trainer, in place of what the options name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlite.data.source import Source
from rlite.trainer.callbacks import Callback
from rlite.trainer.held_out import KEY

REWARD = "reward"
"""group of options of rewards, of a run or of a set"""
IN_MEMORY = "(rows of the program)"
"""path of rows that a program gives"""


@dataclass(frozen=True)
class ProgramObjects:
    """Objects of a program. A command gives none."""

    rows: Iterable[Mapping[str, Any]] | None = None
    """rows to train on, in place of those of the path"""
    test_rows: Mapping[str, Iterable[Mapping[str, Any]]] = field(default_factory=dict)
    """rows to evaluate on, in place of those of the paths, by the set's group of options"""
    rewards: Mapping[str, Mapping[str, Callable[..., Any]]] = field(default_factory=dict)
    """reward functions in place of those of the paths: by the group of options, `reward` or that of a set, and name"""
    callbacks: Sequence[Callback] = ()
    """callbacks besides those of `trainer.callbacks`"""

    def source(self, source: Source) -> Source:
        """Return a table that an option names, with the rows that the program gives in its place."""
        is_test = source.key.split(".")[0] == KEY
        return source._replace(rows=self.test_rows.get(source.key) if is_test else self.rows)

    def functions(self, key: str = REWARD) -> Mapping[str, Callable[..., Any]]:
        """Return the reward functions that take the place of those that a group of options names, by name."""
        return self.rewards.get(key, {})


NOTHING = ProgramObjects()
"""the objects of a command"""
