"""Start of a run in its folder: a new run, the existing run continued, or a refusal."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO
from weakref import WeakValueDictionary

from rlite.arguments import read_saved, shown
from rlite.errors import ConfigError, FolderInUse
from rlite.observability.trace import earlier_traces
from rlite.owner import LOCK, Owner, to_json
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
RESULTS = "results.json"
"""results of `rlite eval`, if it has once written into the run's folder; they hide the run's curves"""
NEWEST = ("latest", "latest_good")
MAY_DIFFER = {
    *("imports", "launcher", "num_devices"),
    *(
        f"trainer.{name}"
        for name in (
            *("save_dir", "load_ckpt_from", "overwrite"),
            *("total_steps", "n_epochs", "max_skipped_steps", "max_recoveries", "callbacks", "console"),
            *("save_freq", "save_async", "keep", "test_freq", "best_metric", "best_is_highest"),
            *("stop_at", "evaluate", "evaluation_devices"),
            *("record", "record_limit"),
            *("sinks", "use_wandb", "project", "experiment_name", "trace", "trace_steps"),
        )
    ),
}
"""options that may change while a run is still the same run: where and how long it runs, what it writes, and the files
of its own code"""
MAX_SHOWN = 8
NOT_SET = "nothing"


def begins_anew(folder: Path, load_ckpt_from: str | None) -> bool:
    """Return True if the options ask for a new run in `folder`, and not for a continuation of its run."""
    return load_ckpt_from not in NEWEST and (
        load_ckpt_from is None or folder.resolve() not in Path(load_ckpt_from).resolve().parents
    )


def checkpoint_to_load(
    folder: Path, load_ckpt_from: str | None, is_overwritten: bool, options: Mapping[str, Any]
) -> str | None:
    """Choose the checkpoint to resume from: in a used folder the newest one, if the run is the same.

    A run that ended before its first step leaves no results, so a run with other options may start in its folder.

    Args:
        folder: the run's folder; it need not exist.
        load_ckpt_from: a path, "latest", "latest_good", or None.
        is_overwritten: start a new run, regardless of the content of the folder.
        options: the run's config, as `rlite.config.to_container` gives it.

    Returns:
        A path, "latest" or "latest_good"; None for a new run.

    Raises:
        ConfigError: the folder holds the results of another run. Nothing is changed.
    """
    used = [name for name in TRACES if (folder / name).exists()]
    if is_overwritten or not used or not begins_anew(folder, load_ckpt_from):
        return load_ckpt_from
    saved = _read(folder / CONFIG)
    different = [saved] if isinstance(saved, str) else _differences(saved, options, load_ckpt_from)
    if not different:
        return "latest" if any((folder / "state").glob("step-*")) else load_ckpt_from
    foreign = [] if isinstance(saved, str) else [key for key in saved if key not in options]
    if foreign:
        raise ConfigError(
            f"trainer.save_dir={folder}: it holds the results of another trainer ({', '.join(foreign)}: no "
            "option of this one). Choose another folder, or replace its results (trainer.overwrite=true)"
        )
    if not isinstance(saved, str) and not _has_steps(folder):
        return load_ckpt_from
    more = f"; and {len(different) - MAX_SHOWN} more" if len(different) > MAX_SHOWN else ""
    raise ConfigError(
        f"trainer.save_dir={folder}: it holds the results of another run ({'; '.join(different[:MAX_SHOWN])}{more}). "
        "Choose another folder; or go on with that run under these options (trainer.load_ckpt_from=latest); or replace "
        "its results (trainer.overwrite=true)"
    )


class RunLock:
    """Lock of a run's folder, held until `close` or the end of the process. The file names the process.

    Args:
        file: the locked file.
        made: the folder, if it was made for this lock.
    """

    def __init__(self, file: TextIO, made: Path | None = None) -> None:
        self._file, self._pid, self._made = file, os.getpid(), made
        self._name(Owner.of_this_process())

    def close(self) -> None:
        """Let other runs use the folder, and remove it if it was made for nothing else. Safe to call again."""
        if not self._file.closed and os.getpid() == self._pid:  # a forked child holds no lock
            self._name(Owner())
            with suppress(OSError):  # somebody else has removed it, or has put a file there
                if self._made is not None and os.listdir(self._made) == [LOCK]:
                    (self._made / LOCK).unlink()
                    self._made.rmdir()
            self._file.close()

    def _name(self, owner: Owner) -> None:
        self._file.truncate(0)
        self._file.write(to_json(owner))
        self._file.flush()

    @property
    def is_open(self) -> bool:
        """True until `close`."""
        return not self._file.closed


_held: WeakValueDictionary[tuple[int, int], RunLock] = WeakValueDictionary()
"""locks of this process, which the system would give it again, by device and number of the file"""


def lock(folder: Path) -> RunLock:
    """Keep other runs out of a folder, which is made if it is not there.

    Returns:
        The lock.

    Raises:
        FolderInUse: another run of this or another process is using the folder.
    """
    while True:
        made = None if folder.exists() else folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # its last holder has just removed the folder
            if (found := _lock_in(folder, made)) is not None:
                return found


def _lock_in(folder: Path, made: Path | None) -> RunLock | None:
    """Return a lock of a folder that is there, or None if its file was removed meanwhile."""
    path = folder / LOCK
    path.touch()
    key = (path.stat().st_dev, path.stat().st_ino)
    in_use = FolderInUse(f"trainer.save_dir={folder}: another run is under way there; choose another folder")
    if (held := _held.get(key)) is not None and held.is_open:  # before the file is opened: its close ends all locks
        raise in_use
    file = path.open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise in_use from error
        # a file system without locks
    if os.fstat(file.fileno()).st_nlink == 0:  # a lock of it would keep nobody out
        file.close()
        return None
    _held[key] = found = RunLock(file, made)
    return found


def clear(folder: Path) -> None:
    """Delete the files of the overwritten run; opening its metrics replaces them."""
    for name in ("state", BEST, EVALUATED, "latest", RECORD, TRACE, LEARNING):
        discard(folder / name)
    if _is_of_evaluation(folder / RESULTS):
        discard(folder / RESULTS)
    for path in (*folder.glob("*_latest"), *earlier_traces(folder / TRACE)):
        discard(path)


def _has_steps(folder: Path) -> bool:
    """Return whether the folder holds results of a step: checkpoints, a best model, or metrics.

    Rollouts count for a run that writes no file of metrics. Otherwise they may be those of a first step that failed.
    """
    if any(True for pattern in ("state/step-*", BEST) for _ in folder.glob(pattern)):
        return True
    try:
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
        return any(json.loads(line)["step"] > 0 for line in lines)
    except FileNotFoundError:
        return any(True for _ in folder.glob(f"{RECORD}/train-*"))
    except (OSError, ValueError, TypeError, KeyError):
        return True  # metrics that cannot be read may be results


def _is_of_evaluation(file: Path) -> bool:
    """Return whether a file has the results of `rlite eval`, and is no other file of that name."""
    try:
        return "models" in json.loads(file.read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _read(file: Path) -> Mapping[str, Any] | str:
    """Return the options in the file, or why there are none."""
    try:
        return read_saved(file)
    except FileNotFoundError:
        return f"{CONFIG} is missing"
    except ConfigError as error:
        return str(error)


def _differences(saved: Mapping[str, Any], options: Mapping[str, Any], load_ckpt_from: str | None) -> list[str]:
    """Return which options differ from the saved ones. An option that was not saved is newer, and does not count."""
    before, now = dict(_paths(saved)), dict(_paths(options))
    found = [
        f"{key}: {shown(before[key])} there, {shown(now.get(key, NOT_SET))} here"
        for key in before
        if not {key, key.rpartition(".")[0]} & MAY_DIFFER and not (key in now and before[key] == now[key])
        if not isinstance(before[key], Mapping) or not before[key]  # of a group, its options
    ]
    if load_ckpt_from is not None and before.get("trainer.load_ckpt_from") not in (load_ckpt_from, *NEWEST):
        found.append(
            f"trainer.load_ckpt_from: {shown(before.get('trainer.load_ckpt_from'))} there, {load_ckpt_from} here"
        )
    return found


def _paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every group and every value with its path."""
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")
