"""Answers as JSON holds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


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
