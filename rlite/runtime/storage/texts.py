"""Texts by name, such as the state of a job, in memory or in files. Each `save` is complete or has not happened."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

from rlite import files
from rlite.errors import ConfigError, writing


class StateStore(Protocol):
    """Store of texts that survive the writing process, as far as the implementation documents."""

    def load(self, name: str) -> str | None:
        """Return the text saved last under a name, or None."""

    def save(self, name: str, text: str) -> None:
        """Replace the text of a name."""

    def remove(self, name: str) -> None:
        """Forget the text of a name, if there is one."""

    def names(self) -> list[str]:
        """Return all names that have a text."""


class MemoryStore:
    """Texts in this process."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def load(self, name: str) -> str | None:
        """Return the text saved last under a name, or None."""
        return self._texts.get(name)

    def save(self, name: str, text: str) -> None:
        """Replace the text of a name."""
        self._texts[name] = text

    def remove(self, name: str) -> None:
        """Forget the text of a name, if there is one."""
        self._texts.pop(name, None)

    def names(self) -> list[str]:
        """Return all names that have a text."""
        return sorted(self._texts)


class FileStore:
    """Texts in files of one folder that only their owner can read. A text survives a crash of the machine."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def load(self, name: str) -> str | None:
        """Return the text saved last under a name, or None."""
        try:
            return self._path(name).read_text()
        except FileNotFoundError:
            return None

    def save(self, name: str, text: str) -> None:
        """Replace the text of a name."""
        path = self._path(name)
        with writing(path):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.replace(path, text.encode(), mode=0o600)

    def remove(self, name: str) -> None:
        """Forget the text of a name, if there is one."""
        self._path(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return all names that have a text."""
        return sorted(path.stem for path in self._folder.glob("*.json"))

    def _path(self, name: str) -> Path:
        check_name(name)
        return self._folder / f"{name}.json"


def check_name(name: str) -> None:
    """Check that a name is valid for a file and for a Ray actor."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        expected = "expected 1 to 100 letters, digits, '.', '_' or '-', with a letter or digit first"
        raise ConfigError(f"job name {name!r}: {expected}")
