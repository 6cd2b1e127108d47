"""Secrets in files that nobody else can read."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from rlite.errors import ConfigError

MAX_SECRET = 4096
"""characters of a secret"""


def read_secret(file: Path, option: str) -> str:
    """Return the content of a file without white space around it.

    `file`: the file, which its owner alone may read; no link.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, encoding="utf-8") as opened:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                remedy = f"expected a file of yours that nobody else can read: chmod 600 {file}"
                raise ConfigError(f"{option}={file}: {stat.filemode(found.st_mode)}, of user {found.st_uid}; {remedy}")
            return opened.read(MAX_SECRET).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}={file}: {error}") from error


def find_secret(
    variable: str, file: str | None, option: str, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return a secret of a variable, or else of a file; None if there is neither."""
    if (found := environment.get(variable)) is not None:
        return found.strip()
    return None if file is None else read_secret(Path(file).expanduser(), option)
