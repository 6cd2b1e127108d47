"""TensorBoard event files. Imported only when asked for: `pip install 'rlite[tensorboard]'`."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from rlite.services.console.sinks.base import Run


class TensorBoardSink:
    """Scalars in `DIRECTORY/tensorboard`; events of later steps that an earlier attempt logged are hidden."""

    def __init__(self, run: Run) -> None:
        purge_step = None if run.resume_after is None else run.resume_after + 1
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event per metric."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, float(value), step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
