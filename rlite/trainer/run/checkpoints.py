"""The checkpoints of a run: `state/step-N`, of which the newest few are kept, and the choice of one to resume from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlite.engine.train import RliteTrainEngine
from rlite.engine.train_state import StateWriting
from rlite.errors import CheckpointError, DamagedCheckpointError
from rlite.runtime.storage.atomic import MANIFEST, discard, is_sound, verify


class Checkpoints:
    """Writer of checkpoints into a folder, which deletes old ones and finds the one to resume from.

    Further engines (a critic) have folders `step-N-NAME`, which exist before `step-N` does. A checkpoint counts if
    `step-N` exists; its facts name the others.

    `keep`: how many to keep. Checkpoints of later steps than the newest, left by an abandoned run, are deleted.
    `wanted`: a path, "latest", "latest_good", or None.
    """

    def __init__(self, folder: Path, keep: int, wanted: str | None, is_asynchronous: bool) -> None:
        self._folder, self._keep, self._wanted, self._is_asynchronous = folder, keep, wanted, is_asynchronous
        self.under_way: list[StateWriting] = []
        self._newest = self._resumed = self._good = -1
        self._own: list[int] = []
        self.found = self._find(wanted)

    def _find(self, wanted: str | None) -> Path | None:
        """Return the checkpoint to resume from; None for a new run."""
        if wanted is None:
            return None
        if wanted in ("latest", "latest_good"):
            steps = steps_of(self._folder)
            if not steps:
                return None
            found = steps[max(steps)] if wanted == "latest" else self._last_good(steps)
            if found is None:
                raise DamagedCheckpointError(f"trainer.load_ckpt_from=latest_good: all in {self._folder} are damaged")
            return found
        path = Path(wanted)
        if not path.is_dir():
            expected = "expected one, latest, latest_good or null"
            raise CheckpointError(f"trainer.load_ckpt_from={wanted}: no such folder; {expected}")
        if not (path / MANIFEST).exists():
            for folder in (path / "state", path, path.parent / "state"):
                if steps := steps_of(folder):
                    raise CheckpointError(
                        f"trainer.load_ckpt_from={wanted}: no checkpoint; the newest of that run is "
                        f"{steps[max(steps)]} (with trainer.save_dir={folder.parent}: latest)"
                    )
        return path

    def _last_good(self, steps: Mapping[int, Path], names: Iterable[str] = ()) -> Path | None:
        """Return the newest undamaged checkpoint with all of its engines, and with `names` among them."""
        return next((path for _, path in sorted(steps.items(), reverse=True) if _is_whole(path, names)), None)

    def restore(self, engine: RliteTrainEngine, beside: Mapping[str, RliteTrainEngine]) -> dict[str, Any]:
        """Load the found checkpoint into the engines. An engine is loaded completely or not at all.

        Returns the checkpoint's facts; {} for a new run.
        """
        path = self.found
        if path is None:
            return {}
        try:
            if missing := [name for name in beside if not _beside(path, name).is_dir()]:
                raise DamagedCheckpointError(f"{path}: there is no {_beside(path, missing[0]).name} beside it")
            for name, other in beside.items():
                other.load_state(_beside(path, name))
            facts = engine.load_state(path)
            self._resumed = facts["step"]
            return facts
        except DamagedCheckpointError as error:
            good = self._last_good(steps_of(self._folder), beside) if self._wanted == "latest" else None
            if good is not None:
                remedy = f"the last good one is {good}: trainer.load_ckpt_from=latest_good goes on from there"
            elif self._wanted == "latest":
                remedy = f"no checkpoint in {self._folder} is whole; another run may begin from the weights in latest/"
            else:
                remedy = "it cannot be resumed from"
            raise DamagedCheckpointError(f"{error}; {remedy}") from error

    def save(
        self,
        step: int,
        engine: RliteTrainEngine,
        beside: Mapping[str, RliteTrainEngine],
        facts: Mapping[str, Any],
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint and delete old ones. Errors of the previous write are raised here, too.

        `facts`: values that JSON can hold.
        """
        self.finish()
        path = self._folder / f"step-{step}"
        self._delete(path)  # of a run that was given up: its critic must not stand beside this one
        self._newest = step  # first: if a write fails, `finish` deletes this one
        self._own.append(step)
        for name, other in beside.items():
            in_order = other.group.handles[0].process == engine.group.handles[0].process  # one after the other
            self.under_way.append(other.save_state(_beside(path, name), self._is_asynchronous and in_order))
        facts = {"step": step, "beside": [*beside], **facts}
        self.under_way.append(engine.save_state(path, self._is_asynchronous, kept, **facts))
        if not self._is_asynchronous:
            self.finish()

    @property
    def oldest(self) -> int | None:
        """Step of the oldest checkpoint that is written; None if there is none."""
        return min(steps_of(self._folder), default=None)

    def look(self) -> None:
        """Notice writes that have ended, without waiting. A failed write raises CheckpointError."""
        if self.under_way and all(writing.done() for writing in self.under_way):
            self.finish()

    def finish(self) -> None:
        """Wait for the last write, then delete surplus checkpoints."""
        errors = []
        while self.under_way:
            try:
                self.under_way.pop(0).result()
            except CheckpointError as error:
                errors.append(error)
        if errors:
            self._delete(self._folder / f"step-{self._newest}")  # what was written of it is of no use without the rest
            raise errors[0]
        self._clear()

    def confirm(self) -> None:
        """Mark the newest checkpoint as good: a step from its weights was finite. Surplus ones are then deleted."""
        newest = max(self._newest, self._resumed)
        if self._good < newest:
            self._good = newest
            if not self.under_way:
                self._clear()

    def set_aside(self) -> tuple[list[Path], Path | None]:
        """Rename unconfirmed checkpoints of this run to `diverged-N`, which is never found as the latest.

        Returns their new paths, and the newest remaining checkpoint, if any.
        """
        with suppress(CheckpointError):  # a write that failed is not there
            self.finish()
        aside = []
        for step, path in sorted(steps_of(self._folder).items()):
            if step > self._good and step in self._own:
                for folder in [path, *self._folder.glob(f"{path.name}-*")]:
                    renamed = folder.with_name(folder.name.replace("step-", "diverged-", 1))
                    discard(renamed)
                    folder.rename(renamed)
                aside.append(path.with_name(f"diverged-{step}"))
        left = steps_of(self._folder)
        return aside, left[max(left)] if left else None

    def _clear(self) -> None:
        """Delete surplus good checkpoints; nothing, as long as the newest one is not written.

        A run that has saved nothing deletes what a killed run could no longer delete, and no later checkpoint.
        """
        steps = steps_of(self._folder)
        newest = self._newest if self._own else self._resumed
        if newest not in steps or (not self._own and newest < max(steps)):
            return
        good = sorted(step for step in steps if step <= self._good)
        unconfirmed = {step for step in steps if self._good < step <= newest}
        for step in steps.keys() - set(good[-self._keep :]) - unconfirmed:
            self._delete(steps[step])
        self.clear_leftovers()

    def clear_leftovers(self) -> None:
        """Delete what a killed run left half written or half deleted. No write may be under way."""
        for path in self._folder.glob("step-*-*"):
            if not path.with_name(path.name.rpartition("-")[0]).exists():
                _remove(path)
        for left in self._folder.glob(".step-*"):
            discard(left)

    def _delete(self, path: Path) -> None:
        """Delete a checkpoint and everything that belongs to it, as far as it exists."""
        for folder in [path, *self._folder.glob(f"{path.name}-*")]:  # without the first the others do not count
            _remove(folder)


def steps_of(folder: Path) -> dict[int, Path]:
    """Return complete checkpoints by step."""
    matches = [(re.fullmatch(r"step-(\d+)", path.name), path) for path in folder.glob("step-*")]
    return {int(match[1]): path for match, path in matches if match}


def _beside(path: Path, name: str) -> Path:
    return path.with_name(f"{path.name}-{name}")


def _is_whole(path: Path, names: Iterable[str]) -> bool:
    try:
        facts = verify(path)
    except CheckpointError:
        return False
    return all(is_sound(_beside(path, name)) for name in {*facts.get("beside", ()), *names})


def _remove(path: Path) -> None:
    if path.exists():
        renamed = path.with_name(f".{path.name}.deleted")  # half of one must not count
        discard(renamed)
        path.rename(renamed)
        discard(renamed)
