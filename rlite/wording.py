"""Words for messages."""

from __future__ import annotations

import logging
from functools import cache


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 replica" or "2 replicas"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@cache
def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning the first time."""
    logger.warning("%s", message)
