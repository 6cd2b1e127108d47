"""The time at which a run started: the date that its chat template writes, today and after every resume."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rlite import config
from rlite.runtime.storage.atomic import FACTS
from rlite.services.checkpoints import steps_of
from rlite.services.recovery import reporting
from rlite.trainer.run.folder import CONFIG, NEWEST, checkpoint_to_load

STARTED = "started"
"""fact of a checkpoint: the time at which its run started"""


def wanted_checkpoint(resolved: Any) -> str | None:
    """Return the checkpoint to resume from: a path, "latest" or "latest_good"; None for a new run.

    Args:
        resolved: the trainer's config.

    Raises:
        ConfigError: the folder holds another run.
    """
    options = resolved.trainer
    overwrites = options.overwrite and not reporting.has_begun()
    folder = Path(options.save_dir)
    return checkpoint_to_load(folder, options.load_ckpt_from, overwrites, config.to_container(resolved))


def started_at(resolved: Any) -> datetime:
    """Return the time at which the run started that is resumed, else the present.

    Args:
        resolved: the trainer's config. Its group `trainer` has the options of the run.

    Raises:
        ConfigError: the folder holds another run.
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
