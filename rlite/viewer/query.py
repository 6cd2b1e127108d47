"""The parameters of a question that a page asks."""

from __future__ import annotations

from collections.abc import Mapping

from rlite.errors import DataError


class UnknownPlace(DataError):
    """A page asks for a run, a source, a step or a rollout that is not there."""


class Query:
    """Parameters of a question, checked when they are read.

    Args:
        values: the parameters.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def text(self, name: str) -> str:
        """Return a parameter; an empty text if it is not given."""
        return self._values.get(name, "")

    def whole(self, name: str) -> int:
        """Return a parameter that is a whole number.

        Raises:
            DataError: it is missing, or no whole number.
        """
        try:
            return int(self._values[name])
        except (KeyError, ValueError) as error:
            raise DataError(f"{name}: expected a whole number, found {self.text(name)[:40]!r}") from error

    def number(self, name: str) -> float | None:
        """Return a parameter that is a number, or None if it is not given.

        Raises:
            DataError: it is no number.
        """
        try:
            return float(self._values[name]) if name in self._values else None
        except ValueError as error:
            raise DataError(f"{name}: expected a number, found {self.text(name)[:40]!r}") from error
