"""Words for messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 replica" or "2 replicas"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
