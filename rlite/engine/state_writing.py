"""The driver's side of a checkpoint to resume from: its own part of the state, and waiting for the workers' part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlite.checkpoint.atomic import staging, verify
from rlite.checkpoint.randomness import random_state
from rlite.checkpoint.safe import load_values
from rlite.engine.train_executor import TrainExecutor
from rlite.engine.workers import Executor
from rlite.errors import CheckpointError, why_not_written

DRIVER_STATE = "driver.pt"
"""the driver's random numbers and what the program keeps, in a checkpoint"""


class StateWriting:
    """A checkpoint that workers write while training goes on."""

    def __init__(self, path: Path, workers: Executor) -> None:
        self.path = path
        self._workers = workers
        self._error: CheckpointError | None = None
        self.is_known = False
        """whether somebody has heard what became of it"""

    def done(self) -> bool:
        """Return whether it is written, or could not be, without waiting for that."""
        return self.is_known or all(self._workers.call(TrainExecutor.has_saved))

    def result(self, timeout: float | None = None) -> Path:
        """Wait until it is written and return where it is. The engine's other calls wait, too.

        Raises: CheckpointError if it could not be written; what a worker raises; CallTimeout.
        """
        if not self.is_known:
            try:
                replace(self._workers, timeout=timeout).call(TrainExecutor.finish_saving)
            except CheckpointError as error:
                self._error = error
            self.is_known = True
        if self._error is not None:
            raise self._error
        return self.path


def stage_driver_state(final: Path, kept: Mapping[str, Any]) -> Path:
    """Make the folder that becomes the checkpoint `final`, with the driver's part in it, and return it.

    Raises: CheckpointError if it could not be written.
    """
    try:
        folder = staging(final)
        with (folder / DRIVER_STATE).open("wb") as file:
            torch.save({"random": random_state(), "kept": dict(kept)}, file)
    except (OSError, RuntimeError) as error:  # torch.save makes either of a full disk
        raise CheckpointError(f"{final}: could not be written: {why_not_written(error)}") from error
    return folder


def read_driver_state(folder: Path, module: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts of a checkpoint and the driver's part of it: `random` and `kept`.

    Raises: DamagedCheckpointError; CheckpointError if it is not of a module of this name.
    """
    facts = verify(folder)
    if facts.get("module") != module:
        raise CheckpointError(f"{folder}: saved from {facts.get('module')}, this engine has {module}")
    return facts, load_values(folder / DRIVER_STATE)
