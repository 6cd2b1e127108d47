"""Weights & Biases. Imported only when asked for: `pip install 'rlite[wandb]'`.

Without a network set `WANDB_MODE=offline` and upload later with `wandb sync`.
"""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from rlite.services.console.sinks.base import Run


class WandbSink:
    """One wandb run, with its files under `DIRECTORY`.

    A resumed run goes on with the wandb run that the directory logged to before; wandb ignores steps that it has.
    """

    def __init__(self, run: Run) -> None:
        run.directory.mkdir(parents=True, exist_ok=True)
        id_file = run.directory / "wandb_run_id"
        run_id = id_file.read_text() if run.resume_after is not None and id_file.exists() else None
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.directory),
            config=dict(run.config),
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
