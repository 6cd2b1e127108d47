"""What every trainer does around its loop: the run's folder, metrics, checkpoints, resume."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlite import config
from rlite.engine.train import RliteTrainEngine
from rlite.errors import CheckpointError, ConfigError
from rlite.observability.console import ConsoleReporter
from rlite.observability.sinks import Run, open_sinks


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run lives, and what it writes there."""

    save_dir: str
    """holds config.yaml, metrics.jsonl, latest/ (Hugging Face) and state/ (to resume from)"""
    save_freq: int = 20
    """steps between two checkpoints"""
    keep: int = 2
    """checkpoints to keep"""
    test_freq: int = 20
    """steps between two evaluations on test_data, if there is some"""
    load_ckpt_from: str | None = None
    """a folder under some run's state/, or "latest" for the newest of this run; null starts anew"""
    sinks: list[str] = field(default_factory=lambda: ["jsonl"])
    """where metrics go besides the console: jsonl, tensorboard, wandb, trackio"""
    use_wandb: bool = False
    """the same as wandb among the sinks"""
    project: str = "rlite"
    """name for wandb and trackio"""
    experiment_name: str = "run"
    """name for wandb and trackio"""
    seed: int = 42
    """order of the data, and random numbers"""

    def __post_init__(self) -> None:
        for name in ("save_freq", "keep", "test_freq"):
            if getattr(self, name) < 1:
                raise ConfigError(f"trainer.{name}={getattr(self, name)}: expected at least 1")
        if self.use_wandb and "wandb" not in self.sinks:
            object.__setattr__(self, "sinks", [*self.sinks, "wandb"])


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(RunOptions):
    """A run of so many steps."""

    save_dir: str = "runs/ppo"
    """holds config.yaml, metrics.jsonl, rollouts.jsonl, latest/ (Hugging Face) and state/ (to resume from)"""
    total_steps: int = 100
    """rollout batches to train on"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total_steps < 1:
            raise ConfigError(f"trainer.total_steps={self.total_steps}: expected at least 1")


class TrainingRun:
    """A run's folder and what is written there. `step` counts finished steps; resuming continues from it."""

    def __init__(self, options: RunOptions, resolved: Any, shown: Sequence[str], total_steps: int) -> None:
        self.folder = Path(options.save_dir)
        self._options = options
        self._shown = tuple(shown)
        self.total_steps = total_steps
        self._config = resolved
        self.step = 0
        self.checkpoint = self._find_checkpoint()

    def _find_checkpoint(self) -> Path | None:
        wanted = self._options.load_ckpt_from
        if wanted is None:
            return None
        if wanted == "latest":
            found = self._checkpoints()
            return found[-1] if found else None
        if not Path(wanted).is_dir():
            raise CheckpointError(f"trainer.load_ckpt_from={wanted}: no such folder")
        return Path(wanted)

    def _checkpoints(self) -> list[Path]:
        numbered = [(re.fullmatch(r"step-(\d+)", path.name), path) for path in (self.folder / "state").glob("step-*")]
        return [path for _, path in sorted((int(match[1]), path) for match, path in numbered if match)]

    def restore(self, engine: RliteTrainEngine) -> dict[str, Any]:
        """Load the checkpoint to resume from into the engine; returns its facts ({} for a new run)."""
        if self.checkpoint is None:
            return {}
        facts = engine.load_state(self.checkpoint)
        self.step = facts["step"]
        return facts

    def open(self) -> None:
        """Write the resolved config and open the metric sinks, without what a resumed run will write again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config.save(self._config, self.folder / "config.yaml")
        options = self._options
        self._sinks = open_sinks(
            options.sinks,
            Run(
                directory=self.folder,
                project=options.project,
                name=options.experiment_name,
                config=config.to_container(self._config),
                resume_after=self.step,
            ),
        )
        self._drop_later_rollouts()
        self.console = ConsoleReporter(self.total_steps, metrics=self._shown, done_steps=self.step)

    def _drop_later_rollouts(self) -> None:
        """Forget the samples of steps that a resumed run makes again, and of an earlier run in this folder."""
        path = self.folder / "rollouts.jsonl"
        if path.exists():
            *lines, _ = path.read_text(encoding="utf-8").split("\n")  # what follows the last newline was cut off
            kept = [line for line in lines if json.loads(line)["step"] <= self.step]
            path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics of the step that has just ended."""
        self._sinks.log(self.step, metrics)
        self.console.log(self.step, metrics)

    def is_due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now."""
        return self.step % every == 0 or self.step == self.total_steps

    def save(self, engine: RliteTrainEngine, **facts: Any) -> None:
        """Write state/step-N to resume from, and latest/ for others; drop the oldest states."""
        engine.save_state(self.folder / "state" / f"step-{self.step}", step=self.step, **facts)
        engine.save(self.folder / "latest")
        for old in self._checkpoints()[: -self._options.keep]:
            shutil.rmtree(old)

    def close(self) -> None:
        """Close the sinks and the progress bar."""
        self._sinks.close()
        self.console.close()
