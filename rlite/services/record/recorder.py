"""The recorder of a run: it chooses what is recorded, and writes it in the background."""

from __future__ import annotations

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlite.batch import KEYS, NAMED_REWARD, RAGGED
from rlite.rollout.collector.ended import Ended, seconds
from rlite.rollout.collector.lost_groups import in_a_line
from rlite.rollout.episode import Episode
from rlite.services.record.files import ROWS, TOKENS, TRAIN, WRITTEN_TOKENS
from rlite.services.record.writer import RecordWriter, Tables
from rlite.types import Status

WIDEST = 4
"""tokens that one character takes at most"""


class TokenTexts:
    """Decodes sequences, special tokens included.

    `tokenizer`: the model's tokenizer, for this object alone: no other thread may use it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer if isinstance(tokenizer, PreTrainedTokenizerFast) else None
        self._piece = cache(lambda token: self._decode([token]))

    def decode(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of a sequence, and the place at which each token begins, in characters.

        Tokens that are parts of one character begin at the same place.
        """
        pieces = self.pieces(ids)
        return "".join(pieces), [*accumulate(map(len, pieces), initial=0)][:-1]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the part of the text of a sequence that each token adds."""
        pieces = [self._piece(token) for token in ids]
        has_neighbours = "".join(pieces) != self._decode(ids)  # the text of a token depends on those beside it
        return self._in_context(ids) if has_neighbours else pieces

    def _in_context(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds to the text before it."""
        pieces: list[str] = []
        start = read = 0
        known = ""
        for end in range(1, len(ids) + 1):
            text = self._decode(ids[start:end])
            is_whole = not text.endswith("\ufffd")
            is_settled = is_whole or end - read == WIDEST or end == len(ids)
            pieces.append(text[len(known) :] if is_settled else "")
            if is_settled:
                # bytes that are no character, taken once more with what follows, would make another text
                start, read = (read if is_whole else end), end
                known = self._piece(ids[start]) if read - start == 1 else self._decode(ids[start:read])
        return pieces

    def _decode(self, ids: Sequence[int]) -> str:
        if self._backend is not None:  # the same, without the cost of its checks
            return self._backend.decode(ids, skip_special_tokens=False)
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


logger = logging.getLogger(__name__)
MAX_EVENTS = 256
"""events of an episode that are recorded, the first"""
SHORTEST = 1e-3
"""seconds of the environment that make an event"""
SEPARATOR = ", "
"""between the kinds of failed attempts in a column"""
MAX_REASON = 500
"""characters of a reason"""
NOT_FINITE = "the loss or the gradients of its update were not finite"
NO_TOKENS = "it has no token to train on, and its update was skipped"
TRAINED = {
    "trained_logprobs": "trainer_logprobs",
    "old_logprobs": "trainer_logprobs",
    "advantages": "advantages",
    "entropies": "entropy",
}
"""columns of tokens that the trainer makes, by the keys of a batch; a later key counts more than an earlier one"""
TOKEN_TYPES = {field.name: field.type.value_type.to_pandas_dtype() for field in TOKENS if pa.types.is_list(field.type)}
"""types of the columns of tokens, for NumPy"""
SEQUENCE = {"ids": "input_ids", "mask": "loss_mask", "versions": "versions", "logprobs": "logprobs"}
"""columns of tokens that a trajectory has, by their keys"""
INTEGERS = ("turns", "tool_calls", "tool_errors", "prompt_tokens", "response_tokens", "version_min", "version_max")
"""columns of rows that are made of numbers of a trajectory, in 32 bits"""
RECORDED = {
    *SEQUENCE.values(),
    *("attention_mask", "rewards", "scores", "num_turns", "num_tool_calls", "num_tool_errors", "truncated"),
}
"""keys of a trajectory that are recorded, beside the parts of its reward"""
IN_COLUMNS = {*SEQUENCE.values(), "attention_mask", "advantages", "entropies"}
"""keys of a batch that columns of tokens hold whole"""


class TrainedBatch:
    """A batch as it was trained on, by group and sample."""

    def __init__(self, batch: TensorDict) -> None:
        self._rows: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._columns = {name: as_array(batch[key].float()) for key, name in TRAINED.items() if key in batch}
        self._loss_mask = as_array(batch["loss_mask"].bool())
        self._others = {key: batch[key].cpu() for key in map(str, batch.keys()) if key not in IN_COLUMNS}
        self._is_skipped = as_array(batch["is_skipped"]) if "is_skipped" in batch else np.zeros(len(batch), dtype=bool)
        groups = batch["group_ids"].tolist()
        sequences = batch["sequence_index"].tolist() if "sequence_index" in batch else [0] * len(groups)
        samples: dict[int, int] = defaultdict(lambda: -1)
        for row, (group, sequence) in enumerate(zip(groups, sequences, strict=True)):
            samples[group] += sequence == 0
            self._rows[group, samples[group]].append(row)

    def columns(self, group: int, sample: int, sequence: int, length: int) -> dict[str, Any]:
        """Return the trainer's columns of a sequence, one value for each token; {} if it was not trained on.

        A column that is NaN for every token is left out: no update has made it. `row` and `others` are those of
        WRITTEN_TOKENS.
        """
        if (rows := self._rows.get((group, sample))) is None:
            return {}
        row = rows[sequence]
        own = {name: column[row, :length] for name, column in self._columns.items()}
        known = {name: column for name, column in own.items() if not np.isnan(column).all()}
        return known | {"row": row, "others": [(key, self._value(key, row, length)) for key in self._others]}

    def _value(self, key: str, row: int, length: int) -> dict[str, Any]:
        """Return what a batch holds under a key for one row, without padding, as a value of OTHERS."""
        value = self._others[key][row]
        if key in RAGGED:
            value = value[: int(self._others[RAGGED[key]][row].sum())]
        elif value.dim() and (value[length:] == (KEYS[key].padding if key in KEYS else 0)).all():
            value = value[:length]
        data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "data": data}

    def status(self, group: int, sample: int) -> tuple[Status, str]:
        """Return status and reason of a sample that the batch holds: it is trained if one of its updates was made."""
        rows = self._rows[group, sample]
        if not self._is_skipped[rows].all():
            return "trained", ""
        return "skipped", NOT_FINITE if self._loss_mask[rows].any() else NO_TOKENS

    def advantage(self, group: int, sample: int) -> float | None:
        """Return the mean advantage of a trajectory's tokens to train on; None if there are none."""
        rows = self._rows.get((group, sample))
        if rows is None or "advantages" not in self._columns or not self._loss_mask[rows].any():
            return None
        return float(self._columns["advantages"][rows][self._loss_mask[rows]].mean())


def as_array(values: Tensor) -> np.ndarray:
    """Return the values of a tensor of any device; NumPy has no bfloat16, so float32 takes its place."""
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


class Arrays:
    """The recorded keys of an episode as arrays."""

    def __init__(self, episode: Episode) -> None:
        trajectory = episode.trajectory
        self.columns: dict[str, np.ndarray] = {
            key: as_array(value)
            for key, value in (() if trajectory is None else trajectory.items())
            if isinstance(value, Tensor) and (key in RECORDED or key.startswith(NAMED_REWARD))
        }
        """recorded keys of the trajectory"""
        self.sequences = episode.attempt.arrays() if trajectory is None else list(self._sequences())
        """columns of each sequence without padding: ids, mask, versions, and logprobs if there are some"""

    def _sequences(self) -> Iterator[dict[str, np.ndarray]]:
        columns = {name: self.columns[key] for name, key in SEQUENCE.items() if key in self.columns}
        columns.setdefault("mask", np.zeros_like(columns["ids"]))
        columns["mask"] = columns["mask"].astype(bool)
        columns.setdefault("versions", np.where(columns["mask"], 0, -1))
        for row, length in enumerate(self.columns["attention_mask"].astype(bool).sum(-1).tolist()):
            yield {name: column[row, :length] for name, column in columns.items()}

    def total(self, key: str) -> float | None:
        """Return a value of the whole trajectory, also if it is given token by token; None if it is not given."""
        return float(self.columns[key][0].sum(dtype=np.float64)) if key in self.columns else None

    def count(self, key: str) -> int | None:
        """Return a number of the whole trajectory; None if it is not given."""
        return int(self.columns[key].flatten()[0]) if key in self.columns else None

    def parts(self) -> list[tuple[str, float]]:
        """Return the parts of the reward that count, by name."""
        names = sorted(key for key in self.columns if key.startswith(NAMED_REWARD))
        values = [(name.removeprefix(NAMED_REWARD), float(self.columns[name].flatten()[0])) for name in names]
        return [(_clean(name), value) for name, value in values if not math.isnan(value)]


def make_tables(
    step: int,
    groups: Sequence[Ended],
    texts: TokenTexts,
    shown: Collection[int],
    batch: TensorDict | None = None,
    warn: Callable[[str], None] = logger.warning,
) -> Tables:
    """Return the tables of a step. A trajectory that cannot be read has a row without its columns.

    An episode without a trajectory has the tokens of its last attempt.

    `groups`: the ended groups; none has the status None.
    """
    trained = None if batch is None else TrainedBatch(batch)
    rows: list[dict[str, Any]] = []
    tokens: list[dict[str, Any]] = []
    for place, group in enumerate(groups):
        data = [(_clean(name), _clean(value)) for name, value in group.columns.items()]
        for number, episode in enumerate(group.episodes):
            key = {"step": step, "group": group.group, "sample": group.first_sample + number}
            try:
                columns, own = _read(key, episode, place in shown, texts, trained)
            except Exception as error:  # a workflow's keys may hold anything
                columns, own = {}, []
                place_of = f"step {step}, group {key['group']}, sample {key['sample']}"
                warn(f"{place_of}: the record has a row without the trajectory: {error!r}")
            advantage = None if trained is None else trained.advantage(key["group"], key["sample"])
            texts_of = {"segments": segments_of(own), "data": data} if place in shown else {}
            made = {**key, **_row(group, number), **columns, "advantage": advantage, **texts_of}
            if group.status == "skipped" and trained is not None:  # some samples of the group may be in other updates
                made["status"], made["reason"] = trained.status(key["group"], key["sample"])
            rows.append(made)
            tokens += own
    return {
        "rows": pa.Table.from_pylist(rows, schema=ROWS),
        "tokens": pa.Table.from_pylist(tokens, schema=WRITTEN_TOKENS),
    }


def _read(
    key: Mapping[str, int], episode: Episode, is_shown: bool, texts: TokenTexts, trained: TrainedBatch | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an episode's columns of ROWS, and its rows of TOKENS if it is shown."""
    made = Arrays(episode)
    if not made.sequences:
        return {}, []
    columns = _of_trajectory(made)
    if beyond := [name for name in INTEGERS if not -(2**31) <= (columns[name] or 0) < 2**31]:
        raise OverflowError(f"{', '.join(beyond)}: a number that the column cannot hold")
    return columns, _tokens(key, made, texts, trained) if is_shown else []


def _row(group: Ended, number: int) -> dict[str, Any]:
    episode = group.episodes[number]
    return {
        "item": _clean(group.item),
        "status": group.status,
        "reason": _clean(_reason(group, number))[:MAX_REASON],
        "response_tokens": episode.num_tokens,
        "failed_attempts": _clean(SEPARATOR.join(episode.failed_attempts)),
        "redrawn": _clean(episode.redrawn),
        "answer": None if episode.answer is None else _clean(episode.answer),
        **_times(episode),
    }


def _reason(group: Ended, number: int) -> str:
    """Return why a sample was not trained on: its own failure, or which other sample of the group has failed."""
    if own := group.episodes[number].failure:
        return in_a_line(own)
    failed = next((other for other, episode in enumerate(group.episodes) if episode.failure), None)
    reason = in_a_line(group.reason)
    return reason if failed is None else f"sample {group.first_sample + failed} of the group: {reason}"


def _of_trajectory(made: Arrays) -> dict[str, Any]:
    masks = [sequence["mask"] for sequence in made.sequences]
    versions = np.concatenate([sequence["versions"] for sequence in made.sequences])
    versions = versions[versions >= 0]
    first, turns = masks[0], made.count("num_turns")
    return {
        "reward": made.total("rewards"),
        "reward_parts": made.parts(),
        "score": made.total("scores"),
        "turns": sum(int(mask[0]) + int((mask[1:] & ~mask[:-1]).sum()) for mask in masks) if turns is None else turns,
        "tool_calls": made.count("num_tool_calls"),
        "tool_errors": made.count("num_tool_errors"),
        "prompt_tokens": int(first.argmax()) if first.any() else len(first),
        "response_tokens": sum(int(mask.sum()) for mask in masks),
        "truncated": bool(made.columns["truncated"].any()) if "truncated" in made.columns else None,
        "version_min": int(versions.min()) if len(versions) else None,
        "version_max": int(versions.max()) if len(versions) else None,
    }


def _times(episode: Episode) -> dict[str, Any]:
    if episode.started is None:
        return {}
    rest = None if episode.ended is None else episode.ended - episode.started - seconds(episode, "generate", "reward")
    return {
        "seconds_queue": episode.started,
        "seconds_generate": seconds(episode, "generate"),
        "seconds_environment": None if rest is None else max(0.0, rest),
        "seconds_reward": seconds(episode, "reward"),
        "ended": episode.ended_at,
        "events": [{"name": name, "start": start, "end": end} for name, start, end in _events(episode)[:MAX_EVENTS]],
    }


def _events(episode: Episode) -> list[tuple[str, float, float]]:
    """Return the spans of an episode in order, with the gaps between them as the environment's."""
    assert episode.started is not None
    events, at = [("queue", 0.0, episode.started)], episode.started
    for span in sorted(episode.spans, key=lambda span: span[1]):
        if span[1] - at > SHORTEST:
            events.append(("environment", at, span[1]))
        events.append(span)
        at = max(at, span[2])
    if episode.ended is not None and episode.ended - at > SHORTEST:
        events.append(("environment", at, episode.ended))
    return events


def _tokens(
    key: Mapping[str, int], trajectory: Arrays, texts: TokenTexts, trained: TrainedBatch | None
) -> list[dict[str, Any]]:
    """Return a row of TOKENS for each sequence of a trajectory."""
    rows: list[dict[str, Any]] = []
    for number, sequence in enumerate(trajectory.sequences):
        text, offsets = texts.decode(sequence["ids"].tolist())
        made = {} if trained is None else trained.columns(key["group"], key["sample"], number, len(offsets))
        columns = (sequence | made).items()
        typed = {name: column.astype(TOKEN_TYPES[name]) if name in TOKEN_TYPES else column for name, column in columns}
        rows.append({**key, "sequence": number, "text": text, "offsets": offsets, **typed})
    return rows


def segments_of(sequences: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the texts of sequences by role."""
    segments = []
    for row in sequences:
        is_model = np.asarray(row["versions"]) >= 0
        offsets, at = [*row["offsets"], len(row["text"])], 0
        for written, run in groupby(is_model.tolist()):
            end = at + len(list(run))
            role = "model" if written else "environment" if at else "prompt"
            segments.append({"role": role, "text": row["text"][offsets[at] : offsets[end]]})
            at = end
    return segments


def _clean(text: str) -> str:
    """Return a text without halves of surrogate pairs, which no file can hold."""
    return text.encode("utf-8", "replace").decode()


Amount = Literal["all", "sample", "none"]
"""amount that is recorded: everything; a row of every rollout, and some texts and tokens; nothing"""
NUM_GROUPS = 2
"""groups of each status whose texts and tokens are in a sample of a step"""
NUM_PROMPTS = 8
"""prompts of an evaluation whose texts and tokens are in a sample"""
WHOLE_EVERY = 10
"""steps between two steps of which a sample has the texts and tokens of all groups; step 1 is the first"""


class NoRecorder:
    """Recorder that records nothing."""

    has_removed = False

    def record(self, *arguments: object) -> None:
        """Do nothing."""

    record_evaluation = compact = flush = close = record


class FileRecorder(RecordWriter):
    """Recorder that writes the files of `rlite.services.record`. It ends if a step cannot be written.

    `limit`: bytes on disk.
    """

    def __init__(self, folder: Path, tokenizer: Any, is_whole: bool, limit: int) -> None:
        super().__init__(folder, limit)
        self._texts = TokenTexts(copy.deepcopy(tokenizer))
        self._is_whole = is_whole
        self._has_warned = False

    def record(self, step: int, groups: Sequence[Ended], batch: TensorDict | None = None) -> None:
        """Record the end of groups in a step of training.

        `groups`: none has the status None.
        """
        ordered = sorted(groups, key=lambda group: group.group)
        shown = range(len(ordered)) if self._is_whole else sampled(step, ordered)
        if ordered:
            self.write(TRAIN, step, lambda: make_tables(step, ordered, self._texts, shown, batch, self._warn))

    def record_evaluation(self, name: str, step: int, episodes: Sequence[Ended]) -> None:
        """Record an evaluation."""
        limit = math.inf if self._is_whole else NUM_PROMPTS
        shown = {place for place, episode in enumerate(episodes) if episode.group < limit}
        self.write(f"eval.{name}", step, lambda: make_tables(step, episodes, self._texts, shown, None, self._warn))

    def _warn(self, message: str) -> None:
        """Log the first trajectory that is not recorded; thousands may follow."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s; further ones are not reported", message)


Recorder = FileRecorder | NoRecorder


def sampled(step: int, groups: Sequence[Ended]) -> set[int]:
    """Return the places of the groups whose texts and tokens are in a sample of a step.

    These are the first groups of each status, and all groups of every tenth step, from step 1 on.
    """
    if step % WHOLE_EVERY == 1:
        return set(range(len(groups)))
    places: dict[str | None, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        places[group.status].append(place)
    return {place for own in places.values() for place in own[:NUM_GROUPS]}


def make_recorder(folder: Path, tokenizer: Any, amount: Amount, limit: int) -> Recorder:
    """Return the recorder of a run.

    `limit`: bytes on disk.
    """
    return NoRecorder() if amount == "none" else FileRecorder(folder, tokenizer, amount == "all", limit)
