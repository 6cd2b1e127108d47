"""Names of the models of an evaluation: in tables, in the record, and in the name of its folder. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_NAME = 60
"""characters of the name of the data in the name of a folder"""
ENDINGS = (".jsonl", ".json", ".parquet", ".csv", ".py", ".arrow", ".gz")
"""endings of files that a name leaves out"""
_GENERAL = ("latest", "best", "")
"""names of folders that do not tell whose they are"""


def names_of(model: str, other: str | None) -> list[str]:
    """Return a name for each model: that of its folder, or of the run that has written it.

    Two models of one name are distinguished by the next parts of their paths, such as `latest` and `best` of a run, or
    else by the folders above: `a/model` and `b/model` are a-model and b-model.

    Args:
        model: folder or hub name of the first model.
        other: name of the second model; None without one.
    """
    if other is None:
        return [_name(model)]
    names = [_name(model), _name(other)]
    longer = zip(_longer_names(model), _longer_names(other), strict=False)
    different = (list(pair) for pair in (names, *longer) if len(set(pair)) == 2)
    return next(different, [names[0], f"{names[1]}-2"])


def name_of_questions(source: str) -> str:
    """Return a name for tasks, or for the path of data or of an environment, without the ending of a file.

    Args:
        source: the path, or the tasks.
    """
    stem = Path(source).stem if Path(source).suffix in ENDINGS else Path(source).name
    return _as_file_name(stem)[:MAX_NAME]


def _name(given: str) -> str:
    parts = _parts(given)
    return _as_file_name(parts[_place_of_name(parts)])


def _longer_names(given: str) -> Iterator[str]:
    """Yield the end of a path from the name on, then with one more folder above the name each time."""
    parts = _parts(given)
    for first in range(_place_of_name(parts), 0, -1):
        yield _as_file_name("-".join(parts[first:]))


def _parts(given: str) -> Sequence[str]:
    return Path(given).expanduser().resolve().parts


def _place_of_name(parts: Sequence[str]) -> int:
    return max((place for place, part in enumerate(parts) if part not in _GENERAL), default=0)


def _as_file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text).strip("._-") or "model"
