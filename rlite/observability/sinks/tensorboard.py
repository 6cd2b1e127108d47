"""TensorBoard event files. Imported only when asked for: `pip install 'rlite[tensorboard]'`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from rlite.observability.sinks.base import MetricSink, Run


class TensorBoardSink:
    """Scalars in `directory`; `resume_after` hides events of later steps that an earlier attempt logged."""

    def __init__(self, directory: str | Path, *, resume_after: int | None = None) -> None:
        purge_step = None if resume_after is None else resume_after + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event per metric."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, float(value), step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def open_tensorboard(run: Run) -> MetricSink:
    """Return a sink that writes into `DIRECTORY/tensorboard`."""
    return TensorBoardSink(run.directory / "tensorboard", resume_after=run.resume_after)
