"""Trackio, the local-first experiment tracker of Hugging Face: `pip install 'rlite[trackio]'`."""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from rlite.observability.sinks.base import Run


class TrackioSink:
    """One trackio run in trackio's own directory (`TRACKIO_DIR`); a resumed run continues the run of its name."""

    def __init__(self, run: Run) -> None:
        resume = "never" if run.resume_after is None else "allow"
        self._run = trackio.init(
            project=run.project, name=run.name, config=dict(run.config), resume=resume, embed=False
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a step."""
        self._run.log({key: float(value) for key, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Finish the run, after everything that is buffered is written."""
        self._run.finish()
