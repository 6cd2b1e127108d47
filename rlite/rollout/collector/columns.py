"""The columns of a data item as a record shows them: a few short texts."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from itertools import islice
from typing import Any

MAX_COLUMNS = 16
MAX_NAME = 100
MAX_VALUE = 300
"""characters of a value"""
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = MAX_VALUE


def short_columns(item: Mapping[str, Any]) -> dict[str, str]:
    """Return the first columns of a data item but its `id`, cut to a few hundred characters each.

    Args:
        item: a row of the data; its values may be of any type and size.
    """
    names = islice((name for name in item if name != "id"), MAX_COLUMNS)
    return {str(name)[:MAX_NAME]: _short(item[name])[:MAX_VALUE] for name in names}


def _short(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value) if value is None or isinstance(value, bool | int | float) else _REPR.repr(value)
