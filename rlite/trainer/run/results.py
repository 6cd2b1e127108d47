"""The end of a run in words: the places of its results."""

from __future__ import annotations

from pathlib import Path

from rlite.trainer.options import RunOptions

FILES = {"model": "latest", "best model": "best", "rollouts": "rollouts.jsonl"}


def places(options: RunOptions) -> dict[str, str]:
    """Return the places of the model, the rollouts and the curves of a run, as far as they exist."""
    folder, sinks = Path(options.save_dir), options.all_sinks
    found = {what: str(folder / name) for what, name in FILES.items() if (folder / name).exists()}
    curves = [str(folder / "metrics.jsonl")] if "jsonl" in sinks else []
    curves += [f"tensorboard --logdir {folder}"] if "tensorboard" in sinks else []
    curves += [name for name in sinks if name not in ("jsonl", "tensorboard")]
    return {**found, "curves": ", ".join(curves)} if curves else found
