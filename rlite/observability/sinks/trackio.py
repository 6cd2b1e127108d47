"""Trackio, the local-first experiment tracker of Hugging Face: `pip install 'rlite[trackio]'`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trackio

from rlite.observability.sinks.base import MetricSink, Run


class TrackioSink:
    """One trackio run in trackio's own directory (`TRACKIO_DIR`); `resume` continues the run of that name."""

    def __init__(
        self, *, project: str, name: str, config: Mapping[str, Any] | None = None, resume: bool = False
    ) -> None:
        self._run = trackio.init(
            project=project, name=name, config=dict(config or {}), resume="allow" if resume else "never", embed=False
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a step."""
        self._run.log({key: float(value) for key, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Finish the run, after everything that is buffered is written."""
        self._run.finish()


def open_trackio(run: Run) -> MetricSink:
    """Return a sink that logs a run of `run.project`."""
    return TrackioSink(project=run.project, name=run.name, config=run.config, resume=run.resume_after is not None)
