"""Words for messages."""

from __future__ import annotations

import logging
import math
from functools import cache


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 replica" or "2 replicas"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@cache
def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning the first time."""
    logger.warning("%s", message)


def number(key: str, value: float) -> str:
    """Return a metric's value as text: three digits of seconds, whole tokens per second, four digits of the rest."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if key.endswith("per_second") or size >= 1000:
        return f"{value:,.0f}"
    if key.rpartition("/")[2].startswith("seconds"):
        return f"{value:.{max(0, min(3, 2 - math.floor(math.log10(size))))}f}" if size else "0"
    if size and size < 0.001:
        return f"{value:.1e}"
    return f"{value:.{4 if size < 10 else 2 if size < 100 else 1}f}" if size else "0"
