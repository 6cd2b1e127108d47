"""Resume: which checkpoint a run continues from. In a used folder the same run goes on, and another run is refused.

The answer is a path, "latest" or "latest_good". `Checkpoints` finds the checkpoint, and loads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rlite import config
from rlite.errors import ConfigError
from rlite.runtime.storage.atomic import FACTS
from rlite.trainer.run.best import BEST
from rlite.trainer.run.checkpoints import steps_of
from rlite.trainer.run.folder import CONFIG, RECORD, TRACES
from rlite.trainer.run.interruption import has_begun
from rlite.yaml_texts import differences, read_saved, shown, some_of

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
            *("sinks", "use_wandb", "project", "experiment_name", "entity", "group", "tags"),
            *("trace", "trace_steps"),
        )
    ),
    *(
        f"{model}.{name}"
        for model in ("actor", "critic")
        for name in ("gradient_checkpointing", "offload_optimizer", "reshard_after_forward")
    ),
}
"""options that may change while a run is still the same run: where and how long it runs, what it writes, the files of
its own code, and what only saves memory"""
STARTED = "started"
"""fact of a checkpoint: the time at which its run started"""


def wanted_checkpoint(resolved: Any) -> str | None:
    """Return the checkpoint to resume from: a path, "latest" or "latest_good"; None for a new run."""
    options = resolved.trainer
    overwrites = options.overwrite and not has_begun()
    return checkpoint_to_load(Path(options.save_dir), options.load_ckpt_from, overwrites, config.to_container(resolved))


def started_at(resolved: Any) -> datetime:
    """Return the time at which the run started that is resumed, else the present.

    `resolved`: the trainer's config. Its group `trainer` has the options of the run.
    """
    wanted = wanted_checkpoint(resolved)
    if wanted is None:
        return datetime.now()
    steps = steps_of(Path(resolved.trainer.save_dir) / "state")
    found = [path for _, path in sorted(steps.items(), reverse=True)] if wanted in NEWEST else [Path(wanted)]
    for path in found:  # a damaged one is reported when it is loaded
        with suppress(OSError, ValueError, KeyError):
            return datetime.fromisoformat(json.loads((path / FACTS).read_text())[STARTED])
        with suppress(OSError):  # an earlier version has not saved the time: it wrote this file when it started
            return datetime.fromtimestamp((path.parent.parent / CONFIG).stat().st_mtime)
    return datetime.now()


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

    `folder`: the run's folder; it need not exist. `load_ckpt_from`: a path, "latest", "latest_good", or None. Returns a
    path, "latest" or "latest_good"; None for a new run.
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
    raise ConfigError(
        f"trainer.save_dir={folder}: it holds the results of another run ({some_of(different)}). "
        "Choose another folder; or go on with that run under these options (trainer.load_ckpt_from=latest); or replace "
        "its results (trainer.overwrite=true)"
    )


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
    compared = [
        key
        for key, value in before.items()
        if not {key, key.rpartition(".")[0]} & MAY_DIFFER
        if not isinstance(value, Mapping) or not value  # of a group, its options
    ]
    found = differences(before, now, compared)
    if load_ckpt_from is not None and before.get("trainer.load_ckpt_from") not in (load_ckpt_from, *NEWEST):
        there = shown(before.get("trainer.load_ckpt_from"))
        found.append(f"trainer.load_ckpt_from: {there} there, {load_ckpt_from} here")
    return found


def _paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every group and every value with its path."""
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")
