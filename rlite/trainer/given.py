"""Objects that a program gives a trainer, in place of what the options name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlite.data.source import Source
from rlite.trainer.callbacks import Callback
from rlite.trainer.held_out import KEY

IN_MEMORY = "(rows of the program)"
"""path of rows that a program gives"""


@dataclass(frozen=True)
class Given:
    """Objects of a program. A command gives none."""

    rows: Iterable[Mapping[str, Any]] | None = None
    """rows to train on, in place of those of the path"""
    test_rows: Mapping[str, Iterable[Mapping[str, Any]]] = field(default_factory=dict)
    """rows to evaluate on, in place of those of the paths, by the set's group of options"""
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """reward functions by name, in place of those of the paths"""
    callbacks: Sequence[Callback] = ()
    """callbacks besides those of `trainer.callbacks`"""

    def source(self, source: Source) -> Source:
        """Return a table that an option names, with the rows that the program gives in its place.

        Args:
            source: the table, of `test_data` or of the data to train on.
        """
        is_test = source.key.split(".")[0] == KEY
        return source._replace(rows=self.test_rows.get(source.key) if is_test else self.rows)


NOTHING = Given()
"""the objects of a command"""
