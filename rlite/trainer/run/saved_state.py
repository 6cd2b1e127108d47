"""State of a run in its folder, to go on from: the lock of the folder, `latest/`, and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlite import config
from rlite.data.chat.template import CLOCK
from rlite.engine.train import RliteTrainEngine
from rlite.errors import CheckpointError, ConfigError, why_not_written
from rlite.runtime.cluster.session import at_shutdown
from rlite.trainer.run.checkpoints import Checkpoints
from rlite.trainer.run.folder import CONFIG, clear, lock
from rlite.trainer.run.interruption import has_begun
from rlite.trainer.run.resume import STARTED, begins_anew, wanted_checkpoint


class SavedState:
    """Loads what an earlier attempt has saved, and saves.

    `resolved`: the trainer's config, which is saved. Its group `trainer` has the options of the run.
    """

    def __init__(self, resolved: Any) -> None:
        self._config, self._options, self._kind = resolved, resolved.trainer, type(resolved).__name__
        self.folder = Path(self._options.save_dir)
        self._overwrites = self._options.overwrite and not has_begun()
        self._started = CLOCK.now()
        self.held = ExitStack()
        """holds the folder, from `restore` on"""
        self.checkpoints = self._find_checkpoints()

    def _find_checkpoints(self) -> Checkpoints:
        options, wanted = self._options, wanted_checkpoint(self._config)
        return Checkpoints(self.folder / "state", options.keep, wanted, is_asynchronous=options.save_async)

    def restore(self, engine: RliteTrainEngine, others: Mapping[str, RliteTrainEngine]) -> dict[str, Any]:
        """Lock the folder, take the engines to save, and load the checkpoint to resume from into them.

        Returns the facts that were saved; {} for a new run.
        """
        self._engine, self._others = engine, others
        with self._writing():
            self.held.callback(lock(self.folder).close)
        at_shutdown(self.held.close)  # for a trainer whose loop is not `fit`
        self.checkpoints = self._find_checkpoints()  # another run may have gone on since
        facts, found = self.checkpoints.restore(engine, others), self.checkpoints.found
        if facts and (damage := self.nonfinite_weights()):
            raise CheckpointError(f"{found}: {damage}; resume from an earlier one")
        if facts and facts.get("config", self._kind) != self._kind:
            told = f"{found}: saved by a run of {facts['config']}, and this one is of {self._kind}"
            raise CheckpointError(f"{told}: another trainer begins from the weights in latest/")
        return facts

    def open(self) -> None:
        """Write the resolved config, after removing what belongs to no step of this run."""
        with self._writing():
            if self.begins_empty:
                clear(self.folder)
            if self.checkpoints.found is not None:
                self.checkpoints.clear_leftovers()  # a resumed run that is finished already saves nothing itself
            config.save(self._config, self.folder / CONFIG)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = why_not_written(error)
            raise ConfigError(f"trainer.save_dir={self.folder}: cannot be written to: {why}") from error

    @property
    def begins_empty(self) -> bool:
        """True if what the folder holds is deleted first."""
        return self._overwrites and begins_anew(self.folder, self._options.load_ckpt_from)

    @property
    def way_on(self) -> str:
        """Name of the command that resumes this run."""
        return "The same command without trainer.overwrite=true" if self.begins_empty else "The same command"

    def nonfinite_weights(self) -> str:
        """Return the names of weights that are not finite, as text; "" if all are finite."""
        engines = {"model": self._engine, **self._others}
        return "; ".join(
            f"weights hold NaN or infinity: {key} {', '.join(names[:3])}{', ...' if names[3:] else ''}"
            for key, engine in engines.items()
            if (names := engine.nonfinite_parameters())
        )

    def write_models(self) -> None:
        """Write the models for other programs."""
        for name, other in self._others.items():
            other.save(self.folder / f"{name}_latest")
        self._engine.save(self.folder / "latest")

    def write_state(self, step: int, facts: Mapping[str, Any], kept: Mapping[str, Any] | None) -> None:
        """Write a checkpoint, maybe in the background.

        `facts`: values that JSON can hold.
        """
        own = {"config": self._kind, STARTED: self._started.isoformat()}
        self.checkpoints.save(step, self._engine, self._others, {**own, **facts}, kept)
