"""The journal of an evaluation: settings, then a line for each sample that has ended. Lines are only appended.

A process that is killed loses the samples that were under way. A line that it cut off is removed by the next process.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any

from rlite.arguments import flat, shown
from rlite.errors import ConfigError, DataError, writing

VERSION = 1
"""version of the format"""
MAX_SHOWN = 8
"""settings that a message names"""
NOT_SET = "nothing"
_BEGINNING = b'{"version": '
Settings = Mapping[str, Any]
"""values of JSON by key"""


class Journal:
    """The file to which the samples of one model go. Making it checks the file; `begin` opens or makes it.

    Its owner holds the folder's lock.

    Args:
        path: the file. One that exists is continued.
        settings: the settings that decide the samples.
        overwrite: start over, regardless of the content of the file.

    Raises:
        ConfigError: the file holds samples of other settings, or is no journal.
        StorageError: the file cannot be read.
    """

    def __init__(self, path: Path, settings: Settings, overwrite: bool = False) -> None:
        self.path, self._settings = path, settings
        with writing(path):
            content = b"" if overwrite or not path.is_file() else path.read_bytes()
        header, lines = _read(content, path)
        if header is not None and (different := differences(_check_header(header, path), settings)):
            raise ConfigError(
                f"{path}: it holds samples of other settings ({'; '.join(different)}). Continue with the former "
                "settings, choose another folder (out=FOLDER), or replace the samples (overwrite=true)"
            )
        self.lines: list[dict[str, Any]] = lines
        """samples that have ended, in the order of their ends"""
        self.is_new = header is None
        """there are no samples to continue"""
        self._end = content.rfind(b"\n") + 1
        self._opened = ExitStack()
        self._file: FileIO

    def begin(self, time: datetime | None = None) -> None:
        """Remove what is not continued, and write the settings of a new journal.

        Args:
            time: time that chat templates write in the prompts of the samples.

        Raises:
            StorageError: the file cannot be written.
        """
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            # without a buffer: what could not be written would be written again, and fail again, when it is closed
            self._file = self._opened.enter_context(os.fdopen(descriptor, "r+b", buffering=0))
            self._file.truncate(self._end)
            self._file.seek(self._end)
        if self.is_new:
            began = {} if time is None else {"time": time.isoformat()}
            self._write({"version": VERSION, "settings": self._settings, **began})

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a sample that has ended, after `begin`.

        Args:
            line: values of JSON by key.

        Raises:
            StorageError: the file cannot be written.
        """
        self._write(line)
        self.lines.append(dict(line))

    def close(self) -> None:
        """Close the file, if it was begun."""
        self._opened.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        made = json.dumps(line).encode() + b"\n"
        with writing(self.path):
            rest = made
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with suppress(OSError):  # a part of a line would damage the journal if another one followed
                    self._file.truncate(self._end)
                    self._file.seek(self._end)
                raise
        self._end += len(made)


def read_journal(path: Path) -> tuple[Settings, list[dict[str, Any]]]:
    """Return the settings and the samples of a journal, whether or not a process still writes it.

    Raises:
        ConfigError: there is no journal.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    header, lines = _read(content, path)
    return _check_header(header, path), lines


def time_of(path: Path) -> datetime | None:
    """Return the time that chat templates wrote in the prompts of a journal; None if the journal does not say it."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError), path.open("rb") as file:
        return datetime.fromisoformat(json.loads(file.readline())["time"])
    return None


def is_journal(path: Path) -> bool:
    """Return whether a file holds the samples of an evaluation."""
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING


def differences(there: Settings, here: Settings) -> list[str]:
    """Return the settings that differ, with both values; of many, the first.

    Args:
        there: settings of the journal.
        here: settings to compare.
    """
    before, now = dict(flat(there)), dict(flat(json.loads(json.dumps(here))))
    different = [
        f"{key}: {shown(before.get(key, NOT_SET))} there, {shown(now.get(key, NOT_SET))} here"
        for key in dict.fromkeys([*before, *now])
        if before.get(key, NOT_SET) != now.get(key, NOT_SET)
    ]
    num_more = len(different) - MAX_SHOWN
    return different if num_more <= 0 else [*different[:MAX_SHOWN], f"and {num_more} more"]


def _check_header(header: Mapping[str, Any] | None, path: Path) -> Settings:
    """Return the settings of a journal.

    Raises:
        ConfigError: the file is no journal, or of another version.
    """
    if header is None or not isinstance(header.get("settings"), dict):
        raise ConfigError(f"{path}: no settings of samples in it; choose another folder")
    if header.get("version") != VERSION:
        raise ConfigError(
            f"{path}: samples of format {header.get('version')}, and this version of rlite writes {VERSION}; choose "
            "another folder (out=FOLDER)"
        )
    return header["settings"]


def _read(content: bytes, path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return the header of a journal, None without one, and its further lines.

    A line that a killed process has cut off is left out.

    Raises:
        ConfigError: the file is no journal, or a line is no object of JSON.
    """
    if not (content.startswith(_BEGINNING) or _BEGINNING.startswith(content)):
        raise ConfigError(f"{path}: expected the samples of an evaluation, found another file")
    values = [_value(line, number, path) for number, line in enumerate(content.split(b"\n")[:-1], 1)]
    return (values[0], values[1:]) if values else (None, [])


def _value(line: bytes, number: int, path: Path) -> dict[str, Any]:
    """Return the value of a line.

    Raises:
        ConfigError: the line is no object of JSON.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number}: expected JSON: {error}; choose another folder") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}, line {number}: expected an object of JSON; choose another folder")
    return value


SOLVED_AT = 1.0
"""score from which a sample counts as solved, for pass@k and majority@k"""
ROUNDING = 2.0**-23
"""relative rounding error of float32, in which scores are kept"""


@dataclass(frozen=True)
class Sample:
    """One answer of the model to one item, with its score.

    Raises:
        DataError: the score is not finite.
    """

    item: str
    """name of the data item, which no other item has"""
    sample: int
    """number among the samples of the item, from 0"""
    score: float | None
    """None: the episode failed"""
    reason: str = ""
    """why the episode failed"""
    truncated: bool = False
    """a limit cut the model off"""
    answer: str | None = None
    """answer that the reward has named; None if it names none"""
    length: int = 0
    """tokens that the model wrote, in the last attempt"""
    failed_attempts: tuple[str, ...] = ()
    """kinds of the errors of the attempts that failed"""
    redrawn: str = ""
    """kind of the failure after which the model answered anew; empty if it did not"""

    def __post_init__(self) -> None:
        if self.score is not None and not math.isfinite(self.score):
            raise DataError(
                f"item {self.item}, sample {self.sample}: its score is {self.score}; expected a finite number, or None "
                "with a reason"
            )


def reaches(value: float, threshold: float) -> bool:
    """Return whether a value is at least a threshold, or equal to it up to the rounding of float32.

    Scores are kept in float32: a score of 0.7 is 0.699999988.
    """
    return value >= threshold or math.isclose(value, threshold, rel_tol=ROUNDING)
