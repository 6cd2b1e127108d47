"""The driver's side of a checkpoint to resume from: it writes the driver's state and waits for the workers."""

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
"""file in a checkpoint that holds the driver's random state and the values that the program keeps"""


class StateWriting:
    """A checkpoint that workers write while training continues.

    Args:
        path: final path of the checkpoint.
        workers: the workers that write it.
    """

    def __init__(self, path: Path, workers: Executor) -> None:
        self.path = path
        self._workers = workers
        self._error: CheckpointError | None = None
        self.is_known = False
        """whether the outcome has been reported to the caller"""

    def done(self) -> bool:
        """Return whether the checkpoint is written or has failed, without waiting."""
        return self.is_known or all(self._workers.call(TrainExecutor.has_saved))

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is written. The engine's other calls wait, too.

        Args:
            timeout: seconds; None is the session's `call_timeout`.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: the checkpoint could not be written.
            CallTimeout: the checkpoint was not written in time.
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
    """Make the folder that becomes the checkpoint `final`, and write the driver's state into it.

    Args:
        final: path of the finished checkpoint.
        kept: plain values and tensors that the program keeps.

    Returns:
        The folder, under a temporary name.

    Raises:
        CheckpointError: the state could not be written.
    """
    try:
        folder = staging(final)
        with (folder / DRIVER_STATE).open("wb") as file:
            torch.save({"random": random_state(), "kept": dict(kept)}, file)
    except (OSError, RuntimeError) as error:  # torch.save makes either of a full disk
        raise CheckpointError(f"{final}: could not be written: {why_not_written(error)}") from error
    return folder


def read_driver_state(folder: Path, module: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts of a checkpoint, and the driver's state: `random` and `kept`.

    Args:
        folder: folder of the checkpoint.
        module: class name of the engine's module.

    Raises:
        DamagedCheckpointError: a file is missing or damaged.
        CheckpointError: the checkpoint was saved from another module.
    """
    facts = verify(folder)
    if facts.get("module") != module:
        raise CheckpointError(f"{folder}: saved from {facts.get('module')}, this engine has {module}")
    return facts, load_values(folder / DRIVER_STATE)
