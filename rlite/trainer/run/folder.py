"""The folder of a run: names of its files, its lock, and the deletion of an overwritten run."""

from __future__ import annotations

import json
from pathlib import Path

from rlite.observability.trace import earlier_traces
from rlite.runtime.owner import LOCK, FolderLock, lock_folder
from rlite.runtime.storage.atomic import discard
from rlite.trainer.run.best import BEST, EVALUATED

CONFIG = "config.yaml"
RECORD = "record"
"""folder of the record"""
LEARNING = "learning.json"
"""facts about what a run learns from, for those who look at it"""
TRACES = (CONFIG, "metrics.jsonl", RECORD, "state")
"""files that a run leaves in its folder"""
TRACE = "trace.json"
CHAIN = "chain.jsonl"
PRINTS = "prints.jsonl"
"""texts that rewards, environments and tools have printed"""
RESULTS = "results.json"
"""results of `rlite eval`, if it has once written into the run's folder; they hide the run's curves"""


def lock(folder: Path) -> FolderLock:
    """Keep other runs out of a folder, which is made if it is not there."""
    in_use = f"trainer.save_dir={folder}: another run is under way there; choose another folder"
    return lock_folder(folder, LOCK, in_use, is_kept=True)


def clear(folder: Path) -> None:
    """Delete the files of the overwritten run; opening its metrics replaces them."""
    for name in ("state", BEST, EVALUATED, "latest", RECORD, TRACE, LEARNING, CHAIN, PRINTS):
        discard(folder / name)
    if _is_of_evaluation(folder / RESULTS):
        discard(folder / RESULTS)
    for path in (*folder.glob("*_latest"), *earlier_traces(folder / TRACE)):
        discard(path)


def _is_of_evaluation(file: Path) -> bool:
    """Return whether a file has the results of `rlite eval`, and is no other file of that name."""
    try:
        return "models" in json.loads(file.read_bytes())
    except (OSError, ValueError, TypeError):
        return False
