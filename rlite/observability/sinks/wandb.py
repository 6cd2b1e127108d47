"""Weights & Biases. Imported only when asked for: `pip install 'rlite[wandb]'`.

Without a network set `WANDB_MODE=offline` and upload later with `wandb sync`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from rlite.observability.sinks.base import MetricSink, Run


class WandbSink:
    """One wandb run. `mode` is wandb's own ("online", "offline", "disabled"); None leaves it to `WANDB_MODE`.

    With `resume` it goes on with the run that this directory logged to before; wandb ignores steps that it has.
    """

    def __init__(
        self,
        *,
        project: str,
        name: str,
        directory: str | Path,
        config: Mapping[str, Any] | None = None,
        mode: Any = None,
        resume: bool = False,
    ) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        id_file = Path(directory) / "wandb_run_id"
        run_id = id_file.read_text() if resume and id_file.exists() else None
        self._run = wandb.init(
            project=project,
            name=name,
            dir=str(directory),
            config=dict(config or {}),
            mode=mode,
            id=run_id,
            resume="allow" if run_id else None,
        )
        id_file.write_text(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step, which is also logged as the metric `step`."""
        self._run.log({"step": step, **{key: float(value) for key, value in metrics.items()}}, step=step)

    def close(self) -> None:
        """Finish the run, after everything that is buffered is written or sent."""
        self._run.finish()


def open_wandb(run: Run) -> MetricSink:
    """Return a sink that logs a run of `run.project`, with its files under `DIRECTORY`."""
    return WandbSink(
        project=run.project,
        name=run.name,
        directory=run.directory,
        config=run.config,
        resume=run.resume_after is not None,
    )
