"""Saved weights: folders with names, each beside a file of facts. Without its facts a folder counts as not written.

    weights/NAME        PEFT's files, and the optimizer's state (sampler_weights/NAME has none)
    weights/.NAME.json  number of the request that saved them, times, and the description of the model

One thread makes all changes, so that none meets another.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

from rlite.errors import CheckpointError
from rlite.files import replace
from rlite.runtime.storage.atomic import discard, publish, staging


def read_facts(folder: Path) -> dict[str, Any] | None:
    """Return what is known of saved weights; None if there are none, or their time is over."""
    file = _facts_file(folder)
    facts = json.loads(file.read_bytes()) if folder.is_dir() and file.exists() else None
    return None if facts is None or (facts["expires"] or math.inf) < time.time() else facts


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Write what is known of saved weights, whole or not at all."""
    replace(_facts_file(folder), json.dumps(facts).encode(), 0o600)


def expiry(seconds: int | None) -> float | None:
    """Return the time at which weights expire; None if never.

    Args:
        seconds: seconds from now; None keeps them.
    """
    return None if seconds is None else time.time() + seconds


def saved_weights(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the weights that clients have named in a folder, with their facts, the oldest first."""
    folders = [each for each in folder.glob("[!._]*") if each.is_dir()] if folder.is_dir() else []
    found = [(each, facts) for each in folders if (facts := read_facts(each)) is not None]
    return sorted(found, key=lambda each: each[1]["time"])


def drop_expired(model_folder: Path) -> None:
    """Delete the weights of a model whose time is over, and those that were not written whole."""
    for kind in ("weights", "sampler_weights"):
        for path in (model_folder / kind).glob("*"):
            if path.name.endswith(".writing") or (path.is_dir() and read_facts(path) is None):
                drop_weights(path)


def drop_weights(folder: Path) -> None:
    """Delete saved weights."""
    discard(_facts_file(folder))
    discard(folder)


def link(source: Path, folder: Path) -> None:
    """Make a folder with the same files as another, without copying them.

    Args:
        source: the folder.
        folder: the folder to make or replace.

    Raises:
        CheckpointError: the files could not be linked.
    """
    try:
        staged = staging(folder)
        shutil.copytree(source, staged, copy_function=_link_or_copy, dirs_exist_ok=True)
        publish(staged, folder)
    except (OSError, shutil.Error) as error:
        raise CheckpointError(f"{folder}: could not be written: {error}") from error


def _link_or_copy(source: str, target: str) -> None:
    try:
        Path(target).hardlink_to(source)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def _facts_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.json")
