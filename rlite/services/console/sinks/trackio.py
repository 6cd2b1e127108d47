"""Trackio, the local-first experiment tracker of Hugging Face: `pip install 'rlite[trackio]'`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import trackio

from rlite.services.console.sinks.base import Run


class TrackioSink:
    """One trackio run in trackio's own directory (`TRACKIO_DIR`).

    A resumed run goes on with the trackio run that its directory logged to before. Another run whose name is taken gets
    a name of its own.
    """

    def __init__(self, run: Run) -> None:
        run.directory.mkdir(parents=True, exist_ok=True)
        name_file = run.directory / "trackio_run_name"
        is_resumed, name = run.resume_after is not None and run.resume_after >= 0, run.name
        if is_resumed and name_file.exists():
            name = name_file.read_text()
        elif not is_resumed and _is_taken(run):
            name = f"{name}-{uuid.uuid4().hex[:6]}"
        resume = "allow" if is_resumed else "never"
        self._run = trackio.init(project=run.project, name=name, config=dict(run.config), resume=resume, embed=False)
        name_file.write_text(name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a step."""
        self._run.log({key: float(value) for key, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Finish the run, after everything that is buffered is written."""
        self._run.finish()


def _is_taken(run: Run) -> bool:
    """Return whether the project has a run of this name."""
    try:
        return run.name in {known.name for known in trackio.Api().runs(run.project)}
    except ValueError:  # there is no such project yet
        return False
