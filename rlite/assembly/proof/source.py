"""The steps that a run has kept: its folder, or a bundle of one step (`bundle.py`), which is laid out like a folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor

from rlite import files
from rlite.assembly.proof.trainers import RunOfTrainer, check_rows
from rlite.assembly.supervised import read_tokens
from rlite.config import Count
from rlite.data.chat.template import CLOCK
from rlite.data.routing import ROUTED
from rlite.data.tokens import BatchLoader, StreamLoader
from rlite.errors import ConfigError, DataError
from rlite.runtime.storage.atomic import verify
from rlite.services.console.sinks import read_metrics
from rlite.services.record.batches import RecordedBatch, read_batch
from rlite.services.record.chain import Folded, read_chain
from rlite.services.record.files import TRAIN
from rlite.services.record.reader import RecordReader
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.run.checkpoints import steps_of
from rlite.trainer.run.program_objects import IN_MEMORY
from rlite.trainer.run.resume import STARTED

BUNDLE, BATCHES, MADE = "bundle.json", "batches", "made."
"""files of a bundle: its facts, and the folder of its batches; beginning of the names of what a step has made"""
MAX_FACTS = 1 << 20
"""bytes of a bundle's facts that are read"""


@dataclass(frozen=True)
class BundleFacts:
    """Facts that a bundle states; `format` is the version of its files."""

    format: Literal[1]
    step: Count
    trainer: str
    versions: dict[str, str]
    """versions of packages that made the bundle"""
    total_steps: Count
    """steps of the whole run"""
    complete: dict[int, bool]
    """true for each step that was trained on everything that was generated for it"""
    has_data: bool
    has_weights: bool
    hashes: dict[str, str]
    """hashes of files of the run that the bundle was made from, which has more than the bundle"""


_FACTS = TypeAdapter(BundleFacts)


def columns_of(batch: TensorDict) -> dict[str, Tensor]:
    """Return the tensors of a batch by key."""
    return {str(key): value for key, value in batch.items() if isinstance(value, Tensor)}


class Source:
    """The steps of a run.

    Args:
        folder: folder of the run, or an unpacked bundle.
        weights: folder of a run with the checkpoints, for a bundle without weights.
        code: the user's file, which may have the function that maps rows.
    """

    def __init__(self, folder: Path, weights: Path | None = None, code: str | None = None) -> None:
        self.folder, self._states, self._code = folder, (weights or folder) / "state", code
        self.run = RunOfTrainer.read(folder)
        self.notes: list[str] = []
        self._checkpoints = steps_of(self._states)
        self._own = frozenset(self._checkpoints)
        origin = Path(str(self.run.saved["trainer"].get("load_ckpt_from") or "")).expanduser()
        if (match := re.fullmatch(r"step-(\d{1,9})", origin.name)) and not files.is_inside(origin, self._states):
            self._checkpoints.setdefault(int(match[1]), origin)  # of another run, with which this one began
        self._kept: dict[int, RecordedBatch] = {}
        self._rows: Iterator[TensorDict] | None = None
        self._next = 0

    @cached_property
    def bundle(self) -> BundleFacts | None:
        """Facts of a bundle; None for a run.

        Raises:
            DataError: they are damaged, or of another version.
        """
        try:
            with files.reading(self.folder / BUNDLE) as file:
                return _FACTS.validate_json(file.read(MAX_FACTS))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3])
            raise DataError(f"no bundle of this version of rlite: {BUNDLE}: {wrong}") from None

    @cached_property
    def _lines(self) -> dict[int, dict[str, float]]:
        lines: dict[int, dict[str, float]] = {}
        with suppress(FileNotFoundError):
            for line in read_metrics(self.folder / "metrics.jsonl"):
                lines.setdefault(int(line["step"]), {}).update({**line, **lines.get(int(line["step"]), {})})
        return lines

    @property
    def logged_steps(self) -> list[int]:
        """The steps that metrics.jsonl has lines of."""
        return sorted(self._lines)

    def evaluated(self, step: int) -> Mapping[str, float]:
        """Return what the run has logged for the evaluations after a step."""
        return self._lines.get(step, {})

    def samples_of(self, name: str) -> int:
        """Return the largest k of pass@k of a set of evaluations."""
        own = self.run.saved.get("test_data") or {}
        own = own if "path" in own else own.get(name, {})
        return int(own.get("k") or own.get("samples") or 1)

    @property
    def last_step(self) -> int:
        """The last step that the run has logged.

        Raises:
            DataError: it has logged none.
        """
        if self.bundle is not None:
            return self.bundle.step
        if not (steps := [step for step in self._lines if step > 0]):
            raise DataError(f"{self.folder}: metrics.jsonl has no step; name one with --step")
        return max(steps)

    @property
    def is_one_device(self) -> bool:
        """True if the run trained on one device, as a replay does."""
        sizes = [self.run.saved.get("num_devices"), self.run.saved.get("launcher")]
        return sizes in ([None, None], [1, None], [1, "inprocess"], [None, "inprocess"])

    @cached_property
    def chain(self) -> Folded | None:
        """Content of the chain of hashes of the run; None if it has none."""
        return read_chain(self.folder)

    @property
    def changed_after(self) -> int:
        """The step up to which the run had other options, which its folder no longer has; 0 if it never had."""
        return 0 if self.chain is None else self.chain.changed_after

    def check_options(self, step: int) -> None:
        """Check that a step can be made again.

        Raises:
            ConfigError: options of the run were changed since.
        """
        if (first := self.first_step(step)) <= self.changed_after:
            odd = f"the run had other options up to step {self.changed_after}, and its config.yaml has the newer ones"
            raise ConfigError(f"step {step}: {odd}; a replay would begin with step {first}")

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def checkpoint_before(self, step: int) -> Path | None:
        """Return the newest checkpoint before a step; None if the run began with its model."""
        earlier = [own for own in self._checkpoints if own < step]
        return self._checkpoints[max(earlier)] if earlier else None

    def first_step(self, step: int) -> int:
        """Return the first step to make, so that a step can be made."""
        earlier = [own for own in self._checkpoints if own < step]
        return max(earlier, default=0) + 1

    def has_checkpoint(self, step: int) -> bool:
        """Return whether there is a checkpoint after a step."""
        return step in self._own

    def checkpoint(self, step: int, name: str = "") -> Path:
        """Return the checkpoint of an engine after a step."""
        path = self._checkpoints[step]
        return path.with_name(f"{path.name}-{name}") if name else path

    # -- what was learnt -----------------------------------------------------------------------------------------

    def metrics(self, step: int) -> Mapping[str, float] | None:
        """Return what the run has logged for a step; None if it has no line of it."""
        return self._lines.get(step)

    def is_complete(self, step: int) -> bool:
        """Return whether a step was trained on everything that was generated for it."""
        if self.bundle is not None:
            return self.bundle.complete.get(step, False)
        if not self.run.is_rl:
            return True
        if (self.metrics(step) or {}).get("num_filtered"):
            return False  # rollouts ahead of training: groups that a filter refused have rows in other steps
        reader = RecordReader(self.folder)
        reader.refresh()
        return all(row["status"] in ("trained", "skipped") for row in reader.rollouts(TRAIN, step))

    def batch(self, step: int, options: Any) -> TensorDict:
        """Return what a step has received.

        Args:
            step: the step. Those of a supervised run are asked in their order.
            options: the options of the run.

        Raises:
            DataError: it is not kept; the message says which option would have kept it.
        """
        if self.bundle is not None or self.run.is_rl:
            given = self._recorded(step).given
            is_chosen_anew = isinstance(options, PpoConfig) and options.actor.routing_replay == "old_policy"
            return given.exclude(ROUTED) if is_chosen_anew else given
        if self._rows is None:
            before = self.first_step(step)
            self._rows, self._next = iter(self._loader(options, before - 1)), before
        while self._next < step:
            next(self._rows)
            self._next += 1
        if self._next > step:
            self._rows = None
            return self.batch(step, options)
        self._next += 1
        return next(self._rows)

    def made(self, step: int) -> Mapping[str, Tensor]:
        """Return what the run has recorded of what a step has computed."""
        return self._recorded(step).made if self.bundle is not None or self.run.is_rl else {}

    def total_steps(self, options: Any) -> int:
        """Return the number of steps of the whole run."""
        if self.bundle is not None:
            return self.bundle.total_steps
        return options.trainer.total_steps if self.run.is_rl else self._loader(options, 0).num_batches

    def _recorded(self, step: int) -> RecordedBatch:
        if step not in self._kept:
            self._kept = {step: self._bundled(step) if self.bundle is not None else read_batch(self.folder, step)}
        return self._kept[step]

    def _bundled(self, step: int) -> RecordedBatch:
        path = self.folder / BATCHES / f"{step}.safetensors"
        if not path.is_file():
            raise DataError(f"the bundle has no tokens of step {step}: write it with --with-data to replay it")
        try:
            columns = load_file(path)
            made = {name.removeprefix(MADE): value for name, value in columns.items() if name.startswith(MADE)}
            given = {name: value for name, value in columns.items() if not name.startswith(MADE)}
            return RecordedBatch(TensorDict(given, batch_size=[len(given["input_ids"])]), made)
        except (SafetensorError, LookupError, TypeError, RuntimeError) as error:
            raise DataError(f"the bundle's batch of step {step} is damaged: {error}") from error

    def _loader(self, options: Any, step: int) -> BatchLoader | StreamLoader:
        """Return the loader of a supervised run after a step.

        Raises:
            ConfigError: its rows were objects of a program, or pass through code of the user that is not named.
        """
        data, trainer, cls = options.data, options.trainer, self.run.entry.find_trainer()
        if data.path in (None, IN_MEMORY) and not data.mixture:
            raise ConfigError(f"{self.folder}: the rows were objects of a program, and no file has them")
        check_rows(data, "data", self._code)
        facts = verify(self._checkpoints[step]) if step else {}
        config_time = datetime.fromtimestamp((self.folder / "config.yaml").stat().st_mtime)
        started = datetime.fromisoformat(facts[STARTED]) if STARTED in facts else config_time
        with CLOCK.fixed(started):
            name = getattr(options, cls.key).model_name
            rows, _ = read_tokens(data, {}, name, cls.tokenise, cls.kind)
        loader: BatchLoader | StreamLoader
        if rows.stream is None:
            loader = BatchLoader(rows, data.batch_size, trainer.seed, trainer.n_epochs)
        else:
            loader = StreamLoader(rows.stream, data.batch_size, trainer.seed, trainer.total_steps or 0)
        if "loader" in facts:
            loader.load_state_dict(facts["loader"])
        return loader
