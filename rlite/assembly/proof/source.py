"""The steps that a run has kept: its folder, or a bundle of one step (`bundle.py`), which is laid out like a folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
from rlite.assembly.proof.options import ReplayConfig
from rlite.assembly.proof.trainers import RunOfTrainer, beside, check_rows
from rlite.assembly.supervised import read_tokens
from rlite.config import Count
from rlite.data.chat.template import CLOCK
from rlite.data.packs import check_batch
from rlite.data.routing import ROUTED
from rlite.data.tokens import BatchLoader, StreamLoader
from rlite.errors import ConfigError, DataError, RliteError
from rlite.nn.pretrained import load_tokenizer
from rlite.runtime.storage.atomic import FACTS, verify
from rlite.runtime.storage.sharded import naming
from rlite.services.console.sinks import read_metrics
from rlite.services.record.batches import DAMAGED, DamagedBatch, RecordedBatch, check_values, read_batch
from rlite.services.record.chain import METRICS, read_chain
from rlite.services.record.files import TRAIN
from rlite.services.record.reader import RecordReader
from rlite.services.record.recorder import TokenTexts
from rlite.trainer.model.prompt_lengths import vocab_size_of
from rlite.trainer.run.checkpoints import steps_of
from rlite.trainer.run.folder import CONFIG
from rlite.trainer.run.program_objects import IN_MEMORY
from rlite.trainer.run.resume import STARTED
from rlite.yaml_texts import read_saved

BUNDLE, BATCHES, MADE = "bundle.json", "batches", "made."
"""files of a bundle: its facts, and the folder of its batches; beginning of the names of what a step has made"""
MAX_FACTS = 1 << 20
"""bytes of a bundle's facts that are read"""


@dataclass(frozen=True)
class BundleFacts:
    """Facts that a bundle states; `format` is the version of its files."""

    format: Literal[1]
    step: Count
    versions: dict[str, str]
    """versions of packages that made the bundle"""
    total_steps: Count
    """steps of the whole run"""
    complete: dict[int, bool]
    """true for each step that was trained on everything that was generated for it"""
    has_weights: bool
    hashes: dict[str, str]
    """hashes of files of the run that the bundle was made from, which has more than the bundle"""


_FACTS = TypeAdapter(BundleFacts)


class Source:
    """The steps of a run."""

    def __init__(self, folder: Path, options: ReplayConfig) -> None:
        self.folder, self._code, self._path = folder, options.code, Path(options.run).expanduser()
        with reading(folder):
            self.chain = read_chain(folder)
        self.notes: list[str] = []
        if not (folder / CONFIG).is_file():
            raise ConfigError(f"{folder}: there is no {CONFIG}: expected the folder of a run")
        saved, links = read_saved(folder / CONFIG), self.chain.begins
        if own := links[-1].get("class") if links else None:
            told = "what it computes otherwise differs here, or contradicts the record"
            self.notes.append(f"{own!s:.100}, a class of a program, trained, and steps are made by rlite's: {told}")
        kept = [(link.get("step", 0), link["options"]) for link in links if isinstance(link.get("options"), dict)]
        self.run = RunOfTrainer.of(_filled(saved, kept[-1][1]) if kept else saved, folder, options.variables)
        """trainer of the run, with its last options"""
        self._runs: list[tuple[int, RunOfTrainer]] = []
        for step, tree in kept[:-1]:
            try:
                run = RunOfTrainer.of(tree, folder, options.variables)
                run.options(folder, options.code)  # raises if they cannot be used
                self._runs.append((step, run))
            except ConfigError as error:
                self.notes.append(f"the options with which the run went on at step {step} are not known: {error}")
        self._runs += [(step, self.run) for step, _ in kept[-1:]]
        self.weights = weights = folder if options.weights is None else Path(options.weights).expanduser()
        """folder with the checkpoints"""
        if weights != folder:  # a bundle has no paths of the machine that made it
            self._take_places(Source(weights, options.replace(weights=None)).run.saved)
        self._states = weights / "state"
        self._own = steps_of(self._states)
        self._checkpoints = dict(self._own)
        origin = Path(str(self.run.saved["trainer"].get("load_ckpt_from") or "")).expanduser()
        if (match := re.fullmatch(r"step-(\d{1,9})", origin.name)) and not files.is_inside(origin, self._states):
            self._checkpoints.setdefault(int(match[1]), origin)  # of another run, with which this one began
        self._kept: dict[int, RecordedBatch] = {}
        self._rows: Iterator[TensorDict] | None = None
        self._next = 0

    def _take_places(self, saved: Mapping[str, Any]) -> None:
        """Take models and the first checkpoint from the run that has the weights."""
        for group, own in self.run.saved.items():
            for key in ("model_name", "load_ckpt_from"):
                if isinstance(own, dict) and isinstance(theirs := saved.get(group), dict) and theirs.get(key):
                    own[key] = theirs[key]

    @cached_property
    def bundle(self) -> BundleFacts | None:
        """Facts of a bundle; None for a run."""
        try:
            with files.reading(self.folder / BUNDLE) as file:
                return _FACTS.validate_json(file.read(MAX_FACTS))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3])
            raise DataError(f"{self._path}: no bundle of this version of rlite: {BUNDLE}: {wrong}") from None

    def told(self, text: str) -> str:
        """Return a text that names a bundle, and not the folder into which it is unpacked."""
        return text.replace(str(self.folder), str(self._path))

    @cached_property
    def reader(self) -> RecordReader:
        """Reader of the record."""
        reader = RecordReader(self.folder)
        reader.refresh()
        return reader

    @cached_property
    def metrics(self) -> Mapping[int, Mapping[str, float]]:
        """Metrics that the run has logged, by step; 0 has evaluations before the first step."""
        lines: dict[int, dict[str, float]] = {}
        with suppress(FileNotFoundError), reading(self.folder):
            for line in read_metrics(self.folder / METRICS):
                lines[int(line["step"])] = {**line, **lines.get(int(line["step"]), {})}
        return lines

    @cached_property
    def vocabulary(self) -> int | None:
        """Size of the model's vocabulary; None if the model is not there."""
        with suppress(RliteError, LookupError, TypeError):
            return vocab_size_of(self.run.model)
        return None

    def texts(self, tell: Callable[[str], object]) -> TokenTexts | None:
        """Return what decodes the tokens of the run; None if its tokenizer is not there, and `tell` the reason."""
        try:
            return TokenTexts(load_tokenizer(self.run.model))
        except (RliteError, KeyError, TypeError) as error:
            tell(str(error))
            return None

    @property
    def last_step(self) -> int:
        """The last step that the run has logged."""
        if self.bundle is not None:
            return self.bundle.step
        if not (steps := [step for step in self.metrics if step > 0]):
            raise DataError(f"{self.folder}: {METRICS} has no step; name one with --step")
        return max(steps)

    # -- options and checkpoints ---------------------------------------------------------------------------------

    def run_at(self, step: int) -> RunOfTrainer:
        """Return the trainer with the options that made a step: those of the last link before it."""
        found = [run for after, run in self._runs if after < step]
        return found[-1] if found else self.run

    def spans(self, step: int) -> list[tuple[int, int]]:
        """Return first and last step of each span of equal options, from the checkpoint before a step to the step."""
        first = self.first_step(step)
        changes = sorted({after + 1 for after, _ in self._runs if first <= after < step})
        starts = [first, *(n for n in changes if self.run_at(n).deciding != self.run_at(n - 1).deciding)]
        return list(zip(starts, [*(start - 1 for start in starts[1:]), step], strict=True))

    def checkpoint_before(self, step: int) -> Path | None:
        """Return the newest checkpoint before a step; None if the run began with its model."""
        return self._checkpoints.get(self.first_step(step) - 1)

    def first_step(self, step: int) -> int:
        """Return the first step to make, so that a step can be made."""
        return max((own for own in self._checkpoints if own < step), default=0) + 1

    def checkpoint(self, step: int, name: str = "") -> Path | None:
        """Return the checkpoint of an engine after a step; None if there is none."""
        return beside(self._own[step], name) if step in self._own else None

    # -- what was learnt -----------------------------------------------------------------------------------------

    def is_complete(self, step: int) -> bool:
        """Return whether a step was trained on everything that was generated for it."""
        if self.bundle is not None:
            return self.bundle.complete.get(step, False)
        if not self.run.is_rl:
            return True
        if self.metrics.get(step, {}).get("num_filtered"):
            return False  # rollouts ahead of training: groups that a filter refused have rows in other steps
        return all(row["status"] in ("trained", "skipped") for row in self.reader.rollouts(TRAIN, step))

    def batch(self, step: int, options: Any) -> TensorDict:
        """Return what a step has received.

        `step`: the step. Those of a supervised run are asked in their order.
        """
        if self.bundle is not None or self.run.is_rl:
            given = self.recorded(step).given
            is_chosen_anew = self.run.is_rl and options.actor.routing_replay == "old_policy"
            return given.exclude(ROUTED) if is_chosen_anew else given
        if self._rows is None or step < self._next:
            before = self.first_step(step)
            self._rows, self._next = iter(self._loader(options, before - 1)), before
        for _ in range(step - self._next):
            next(self._rows)
        self._next = step + 1
        return next(self._rows)

    def made(self, step: int) -> Mapping[str, Tensor]:
        """Return what the run has recorded of what a step has computed."""
        return self.recorded(step).made if self.bundle is not None or self.run.is_rl else {}

    def total_steps(self, options: Any, step: int) -> int:
        """Return the number of steps of the whole run."""
        total: int = options.trainer.total_steps if self.run.is_rl else 0
        if self.bundle is not None:
            total = self.bundle.total_steps
        elif not self.run.is_rl:
            total = self._loader(options, 0).num_batches
        if step > total:
            raise ConfigError(f"step {step}: the run has {total} steps")
        return total

    def recorded(self, step: int) -> RecordedBatch:
        """Return the recorded batch of a step."""
        if step not in self._kept:
            found = read_batch(self.reader, step) if self.bundle is None else self._bundled(step)
            check_values(found.given, self.vocabulary, f"{self.folder}: step {step}")
            self._kept = {step: found}
        return self._kept[step]

    def _bundled(self, step: int) -> RecordedBatch:
        path = self.folder / BATCHES / f"{step}.safetensors"
        if not path.is_file():
            raise DataError(f"the bundle has no tokens of step {step}: write it with --with-data to replay it")
        try:
            columns = load_file(path)
            made = {name.removeprefix(MADE): columns.pop(name) for name in [*columns] if name.startswith(MADE)}
            check_batch(columns)
            return RecordedBatch(TensorDict(columns, batch_size=[len(columns["input_ids"])]), made)
        except (SafetensorError, *DAMAGED) as error:
            raise DamagedBatch(f"the bundle's batch of step {step} is damaged: {error}") from error

    def _loader(self, options: Any, step: int) -> BatchLoader | StreamLoader:
        """Return the loader of a supervised run after a step."""
        data, trainer, cls = options.data, options.trainer, self.run.trainer
        if data.path in (None, IN_MEMORY) and not data.mixture:
            raise ConfigError(f"{self.folder}: the rows were objects of a program, and no file has them")
        check_rows(data, "data", self._code)
        facts = verify(self._checkpoints[step]) if step else {}
        started = datetime.fromtimestamp((self.folder / CONFIG).stat().st_mtime)
        with naming(self._checkpoints.get(step, self.folder) / FACTS):
            started = datetime.fromisoformat(facts.get(STARTED, started.isoformat()))
        with CLOCK.fixed(started):
            name = getattr(options, cls.key).model_name
            rows, _ = read_tokens(data, {}, name, cls.tokenise, cls.kind)
        loader = rows.loader(data.batch_size, trainer.seed, trainer.n_epochs, trainer.total_steps)
        if "loader" in facts:
            with naming(self._checkpoints[step] / FACTS):
                loader.load_state_dict(facts["loader"])
        return loader


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Name a file of a run that is there, and cannot be opened."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from error


def _filled(saved: Any, kept: Any) -> Any:
    """Return options of config.yaml with the values that the chain has kept of interpolations."""
    if isinstance(saved, Mapping) and isinstance(kept, Mapping):
        return {key: _filled(value, kept.get(key, value)) for key, value in saved.items()}
    if isinstance(saved, list) and isinstance(kept, list) and len(saved) == len(kept):
        return [_filled(*each) for each in zip(saved, kept, strict=True)]
    return kept if isinstance(saved, str) and "${" in saved else saved
