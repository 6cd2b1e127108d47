"""When failing groups stop the run: a decision, without a clock, an engine or a thread."""

from __future__ import annotations


class FailureRuns:
    """How many groups in a row have failed, in the order of their start.

    Their order of ending would not do: where one row in twenty fails at once, the first to end of a large batch are
    failures alone.
    """

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}
        """of each run of failed groups, at the places of its first and of its last group"""

    def add(self, place: int) -> int:
        """Count the group that was the `place`-th to start as failed; returns how many in a row it is among."""
        before, after = self._lengths.pop(place - 1, 0), self._lengths.pop(place + 1, 0)
        length = before + 1 + after
        self._lengths[place - before] = self._lengths[place + after] = length
        return length

    def clear(self) -> None:
        """Begin anew."""
        self._lengths.clear()
