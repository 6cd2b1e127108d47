"""The parameters of a question that a page asks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlite.errors import DataError

MAX_WHOLE = 2**63 - 1
"""largest number of a group"""


class UnknownPlace(DataError):
    """A page asks for a run, a source, a step or a rollout that does not exist."""


class Query:
    """Parameters of a question, checked when they are read.

    Args:
        parameters: names and values; a name may come several times.
    """

    def __init__(self, parameters: Iterable[tuple[str, str]]) -> None:
        self._values: defaultdict[str, list[str]] = defaultdict(list)
        for name, value in parameters:
            self._values[name].append(value.encode(errors="replace").decode())  # halves of surrogate pairs

    def has(self, name: str) -> bool:
        """Return whether a parameter is given."""
        return name in self._values

    def text(self, name: str) -> str:
        """Return a parameter; an empty text if it is not given."""
        return self._values[name][0] if self.has(name) else ""

    def texts(self, name: str) -> list[str]:
        """Return all values of a parameter."""
        return self._values.get(name, [])

    def whole(self, name: str) -> int:
        """Return a parameter that is a whole number from 0 to MAX_WHOLE.

        Raises:
            DataError: it is missing, or no such number.
        """
        try:
            found = int(self.text(name))
        except ValueError:
            found = -1
        if not 0 <= found <= MAX_WHOLE:
            raise DataError(f"{name}: expected a whole number from 0 on, found {self.text(name)[:40]!r}")
        return found

    def number(self, name: str) -> float | None:
        """Return a parameter that is a number, or None if it is not given.

        Raises:
            DataError: it is no finite number.
        """
        if not self.has(name):
            return None
        try:
            found = float(self.text(name))
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise DataError(f"{name}: expected a number, found {self.text(name)[:40]!r}")
        return found


def jsonable(value: Any, not_finite: Callable[[float], Any] = lambda number: None) -> Any:
    """Return a value of which `json.dumps(..., allow_nan=False)` makes JSON. Values of unknown types become texts.

    Args:
        value: any value.
        not_finite: what stands for a number that is not finite; nothing by default.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else not_finite(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(item, not_finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item, not_finite) for item in value]
    return str(value)
