"""The evidence of a run: recorded tokens with two log-probabilities each, and the weights that are nearest to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlite import config
from rlite.assembly.why.activations import watched_module
from rlite.engine.train import RliteTrainEngine
from rlite.errors import CheckpointError, ConfigError, DataError
from rlite.nn.pretrained import load_config, stored_dtype
from rlite.services.console.sinks import read_metrics
from rlite.services.record.chain import METRICS
from rlite.services.record.files import TRAIN, read_gaps
from rlite.services.record.reader import RecordReader, read_part_aside
from rlite.trainer.model.options import ModelOptions
from rlite.trainer.model.prompt_lengths import check_ids, vocab_size_of
from rlite.trainer.options import SamplingOptions
from rlite.trainer.rl.coefficients import SET
from rlite.trainer.run.checkpoints import steps_of
from rlite.trainer.run.folder import CONFIG
from rlite.yaml_texts import read_saved

SIDES = {"engine": "logprobs", "trainer": "trainer_logprobs"}
"""side -> column of the record with its log-probabilities"""
DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
MAX_STATES = 8
"""saved weights that are read, beside the first ones"""
MAX_LENGTH = 4096
"""tokens of a sequence that are read"""
Ids = tuple[int, ...]


class Span(NamedTuple):
    """Adjacent tokens that the model wrote, all of one policy version."""

    before: Ids
    """tokens of the sequence before them"""
    ids: Ids
    version: int
    records: Mapping[str, Tensor]
    """side -> recorded log-probabilities [tokens]; NaN where the record has none"""


@dataclass
class Case:
    """The rows that disagree, and what an honest computation of them needs."""

    config: Mapping[str, Any]
    """the run's config"""
    model_name: str
    """model from which the run began"""
    checkpoints: dict[int, Path | None]
    """saved weights by the number of finished steps; None stands for the model from which the run began"""
    trainer: RliteTrainEngine
    """the trainer's module, with the weights that were loaded last"""
    notes: list[str]
    """assumptions, and checks that were left out, with the reason for each"""
    step: int = 0
    temperature: float | None = None
    """temperature of sampling in the step, if a schedule or a callback has changed it"""
    spans: list[Span] = field(default_factory=list)
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def option(self, path: str, default: Any = None) -> Any:
        """Return a value of the config by its dotted name, or the default if it is missing or null."""
        found: Any = self.config
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return default if found is None else found

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the engine was to serve: `rollout.dtype`, else the checkpoint's."""
        given = DTYPES.get(str(self.option("rollout.dtype")))
        return given or stored_dtype(self.model_name, load_config(self.model_name))

    def sampling(self, side: str) -> dict[str, Any]:
        """Return the sampling parameters with which a side was to make log-probabilities of logits."""
        given = config.load(SamplingOptions, (), given=self.option("rollout.train_sampling_params", {})).gconfig()
        temperature = self.option("actor.temperature") if side == "trainer" else None
        own = self.temperature or (1.0 if given.greedy else given.temperature)
        return {"temperature": float(temperature or own), "top_p": given.top_p, "top_k": max(given.top_k, 0)}

    def recorded(self, side: str) -> Tensor:
        """Return the recorded log-probabilities of a side, [tokens]."""
        return torch.cat([span.records[side] for span in self.spans])

    def version(self, side: str) -> int:
        """Return the number of updates in the weights with which a side computed the spans."""
        return self.spans[0].version if side == "engine" else self.step - 1

    def exact(self, side: str) -> int:
        """Return the saved step whose weights are nearest to those with which a side computed the spans."""
        version = self.version(side)
        return min(self.checkpoints, key=lambda step: (abs(step - version), step > version))

    def load(self, step: int) -> None:
        """Load the weights after a step into the trainer."""
        if (path := self.checkpoints[step]) is None:
            self.trainer.load()
        else:
            self.trainer.load_state(path)

    def load_all(self) -> None:
        """Read the saved weights nearest to the spans, and the first ones, and forget the other checkpoints."""
        version, found = self.spans[0].version, dict[int, Path | None]()
        nearest = sorted(self.checkpoints, key=lambda step: (step > version + 1, abs(step - version)))[:MAX_STATES]
        for step in dict.fromkeys([*nearest, min(self.checkpoints)]):
            try:
                self.load(step)
                self.states[step], found[step] = self.trainer.state_dict(), self.checkpoints[step]
            except CheckpointError as error:
                self.notes.append(f"weights after step {step} are not used: {error}")
        if not found:
            raise CheckpointError("; ".join(["no weights of the run can be read", *self.notes]))
        self.checkpoints = found
        if (exact := self.exact("engine")) != version:
            told = f"no checkpoint has the weights of version {version}; those after step {exact} stand for them"
            self.notes.append(f"{told}, and what training changes between two checkpoints counts as rounding")


def open_case(folder: Path, step: int | None, num_sequences: int, num_tokens: int) -> Case:
    """Return the case of a run's folder. It needs a session with one device in this process.

    `step`: step of the rows; None takes the newest whose weights are there.
    """
    try:
        saved = read_saved(folder / CONFIG)
    except FileNotFoundError as error:
        raise ConfigError(f"run={folder}: no {CONFIG}; expected the folder of a run (trainer.save_dir)") from error
    reader, notes = RecordReader(folder, read_part_aside), [str(gap) for gap in read_gaps(folder)]
    reader.refresh()
    rows = reader.table(TRAIN).select(["step", "version_max"]).to_pylist()
    versions = {row["step"]: row["version_max"] for row in rows if row["version_max"] is not None}
    case = Case(saved, "", {0: None, **steps_of(folder / "state")}, None, notes)  # type: ignore[arg-type]
    if not (name := case.option("actor.model_name")) or case.option("rollout") is None:
        raise ConfigError(f"run={folder}: no engine samples in this run; expected a run of rlite ppo or rlite grpo")
    case.model_name = str(name)
    if not Path(name).is_dir() and (folder / "latest" / "config.json").is_file():
        notes.append(f"{name}, from which the run began, is not here; latest/, which is newer, stands for it")
        case.model_name = str(folder / "latest")
    order = sorted(versions, key=lambda each: (versions[each] in case.checkpoints, bool(versions[each]), each))
    for number in reversed(order) if step is None else [step]:
        case.step, sequences = number, reader.token_table(TRAIN, [number]).to_pylist()
        if spans := [span for row in sequences for span in spans_of(row, number - 1)]:
            choose(case, spans, num_sequences, num_tokens)
            break
    notes += [f"{file}: {problem}" for file, problem in reader.problems.items()]
    if not case.spans:
        kept = f"it kept trainer.record={case.option('trainer.record', 'sample')}; all would have kept every token"
        where = "its record" if step is None else f"step {step} of its record"
        raise DataError("; ".join([f"run={folder}: no tokens with log-probabilities in {where}", kept, *notes]))
    case.temperature = changed_temperature(folder, case)
    actor = {name: value for name, value in case.option("actor").items() if name in ModelOptions.model_fields}
    case.trainer = RliteTrainEngine(watched_module(config.load(ModelOptions, (), given=actor), case.model_name))
    case.trainer.build()
    for span in case.spans:
        check_ids([*span.before, *span.ids], vocab_size_of(case.model_name))
    return case


def changed_temperature(folder: Path, case: Case) -> float | None:
    """Return the temperature that was logged in the step; None if no schedule or callback has changed it."""
    with suppress(OSError):
        for line in read_metrics(folder / METRICS):
            is_changed = case.option("schedule.temperature") or f"{SET}temperature" in line
            if line["step"] == case.step and is_changed and "temperature" in line:
                return line["temperature"]
    return None


def spans_of(row: Mapping[str, Any], version: int) -> Iterator[Span]:
    """Yield the spans of a recorded sequence. Tokens without a version have the given one."""
    columns = (row[name] or [] for name in ("ids", "mask", "versions", *SIDES.values()))
    tokens = [*zip_longest(*columns)][:MAX_LENGTH]
    ids = tuple(token[0] for token in tokens)
    if None in ids:  # columns of other lengths, or a damaged file
        ids = ids[: ids.index(None)]
    for (is_own, stamp), part in groupby(range(1, len(ids)), lambda place: tokens[place][1:3]):
        places = [*part]
        if is_own:
            records = {
                side: torch.tensor([nan if (x := tokens[place][number]) is None else x for place in places])
                for number, side in enumerate(SIDES, 3)
            }
            own = ids[places[0] : places[-1] + 1]
            yield Span(ids[: places[0]], own, version if stamp is None else stamp, records)


def choose(case: Case, spans: Sequence[Span], num_sequences: int, num_tokens: int) -> None:
    """Keep the spans of the most frequent version on which the records disagree most."""
    version = Counter(span.version for span in spans).most_common(1)[0][0]
    own = [span for span in spans if span.version == version]
    if len(own) < len(spans):
        case.notes.append(f"{len(spans) - len(own)} spans of policy versions other than {version} are left out")
    own.sort(key=lambda span: -float((span.records["engine"] - span.records["trainer"]).abs().nan_to_num(0).mean()))
    size = max(num_tokens // min(num_sequences, len(own)), 1)
    for span in own[:num_sequences]:
        records = {side: values[:size] for side, values in span.records.items()}
        case.spans.append(span._replace(ids=span.ids[:size], records=records))
