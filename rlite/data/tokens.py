"""Tokenized rows: tables, mixtures, and batches of them in a shuffled order that resumes exactly."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from rlite.data.chat.ends import LearntEnds
from rlite.data.mixture import Mixture, shuffled
from rlite.data.prompts import raw_prompts, raw_tokens
from rlite.data.readers.streaming import ShuffledStream, StreamedTable
from rlite.data.source import Table
from rlite.errors import ConfigError, DataError
from rlite.wording import counted

Tokens = tuple[np.ndarray, np.ndarray]
"""(input_ids [L], loss_mask [L]) of one sequence"""
Encode = Callable[[range], list[list[Tokens]]]
"""numbers of rows -> for each row, its sequences"""

_CHUNK = 512
"""rows that are tokenised in one call, in which the tokenizer works in parallel"""
_LONG = 5_000
"""rows from which on a progress bar is shown"""


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Items of tokenised data, each of `rows_per_item` adjacent token rows (preferences: 2, chosen and rejected).

    A token takes four bytes, and one for its mask. Batches are made on demand.
    """

    input_ids: np.ndarray
    """int32 [T], all rows end to end"""
    loss_mask: np.ndarray
    """bool [T]: the tokens to be learnt"""
    starts: np.ndarray
    """int64 [N + 1]: row n is input_ids[starts[n]:starts[n + 1]]"""
    source: np.ndarray
    """int64 [items]: the row of the file that an item was made from"""
    rows_per_item: int = 1
    per_row: dict[str, np.ndarray] = field(default_factory=dict)
    """further keys of a batch, [N, ...] each"""
    tally: Tally
    form: str = ""
    """format of the table's rows, in words"""
    mixture: Mixture | None = None
    """the sources that the items come from, end to end; None if there is one"""
    ends: LearntEnds | None = None
    """the ends of learnt answers; None if nobody compares them with the model's"""
    stream: StreamedTable[TokenRows] | None = None
    """the table of which these rows are the first window; None if they are the whole table"""

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.source)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [N]."""
        return np.diff(self.starts)

    @property
    def last_tokens(self) -> frozenset[int]:
        """Ids of the tokens with which rows end."""
        return frozenset(np.unique(self.input_ids[self.starts[1:] - 1]).tolist())

    def loader(self, batch_size: int, seed: int, n_epochs: int, num_batches: int | None) -> BatchLoader | StreamLoader:
        """Return a loader of shuffled batches."""
        if self.stream is None:
            return BatchLoader(self, batch_size, seed, n_epochs)
        return StreamLoader(self.stream, batch_size, seed, num_batches or 0)

    def items(self) -> list[TokenRows | None]:
        """Return each row of the table as token rows of its own, which share no memory; None for a dropped row."""
        found: list[TokenRows | None] = [None] * self.tally.num_read
        for item, number in enumerate(self.source):
            rows = slice(item * self.rows_per_item, (item + 1) * self.rows_per_item)
            tokens = slice(self.starts[rows.start], self.starts[rows.stop])
            found[number] = replace(
                self,
                input_ids=self.input_ids[tokens].copy(),
                loss_mask=self.loss_mask[tokens].copy(),
                starts=self.starts[rows.start : rows.stop + 1] - tokens.start,
                source=np.zeros(1, dtype=np.int64),
                per_row={key: values[rows].copy() for key, values in self.per_row.items()},
                tally=Tally(num_read=1, max_length=self.tally.max_length, num_kept=1),
            )
        return found

    def digest(self) -> str:
        """Return a hash of all tokens, masks and further keys in their order."""
        digest = hashlib.sha256()
        arrays = {"input_ids": self.input_ids, "loss_mask": self.loss_mask, "starts": self.starts, **self.per_row}
        for name, values in arrays.items():
            digest.update(f"{name} {values.dtype} {values.shape}".encode())
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()

    def batch(self, items: Sequence[int]) -> TensorDict:
        """Make a right-padded batch of these items, their rows adjacent, in this order.

        Returns a TensorDict of batch size [n] with n = rows_per_item x items: `input_ids` int64, `attention_mask` and
        `loss_mask` bool, all [n, L] with the longest row's length L; and the keys of `per_row`.
        """
        if len(items) == 0:
            raise DataError("a batch of no items; expected at least one")
        rows = (np.asarray(items)[:, None] * self.rows_per_item + np.arange(self.rows_per_item)).ravel()
        lengths = self.lengths[rows]
        mask = np.arange(lengths.max()) < lengths[:, None]
        places = np.where(mask, self.starts[rows, None] + np.arange(mask.shape[1]), 0)
        input_ids = np.where(mask, self.input_ids[places], 0).astype(np.int64)
        columns = {"input_ids": input_ids, "attention_mask": mask, "loss_mask": mask & self.loss_mask[places]}
        columns |= {key: values[rows] for key, values in self.per_row.items()}
        return TensorDict({key: torch.from_numpy(values) for key, values in columns.items()}, batch_size=[len(rows)])

    def batches(self, batch_size: int) -> Iterator[TensorDict]:
        """Yield all items once in their order, as for evaluation; the last batch may be smaller."""
        for start in range(0, len(self), batch_size):
            yield self.batch(range(start, min(start + batch_size, len(self))))

    def check_model(self, vocab_size: int, max_positions: int | None, table: str = "data") -> None:
        """Check that the model has every token and every position of the rows.

        `max_positions`: length of the model's longest sequence; None if its config does not say it.
        """
        if (largest := self.input_ids.max()) >= vocab_size:
            row = int(np.searchsorted(self.starts, self.input_ids.argmax(), side="right")) - 1
            raise ConfigError(f"{self._name_of(row, table)} holds {beyond_vocabulary(largest, vocab_size)}")
        if max_positions is not None and (longest := self.lengths.max()) > max_positions:
            name = self._name_of(int(self.lengths.argmax()), table)
            known = f"the model has positions for {max_positions} (max_position_embeddings of its config)"
            raise ConfigError(f"{name} has {longest} tokens, and {known}; lower data.max_length")

    def _name_of(self, row: int, table: str) -> str:
        item = row // self.rows_per_item
        source = "" if self.mixture is None else f".mixture.{self.mixture.source_of(item)[0]}"
        return f"row index {self.source[item]} of {table}{source}"

    def check_capacity(self, capacity: int, name: str, table: str = "data") -> None:
        """Check that every item fits a capacity."""
        sizes = self.lengths.reshape(-1, self.rows_per_item).sum(1)
        if sizes.max() > capacity:
            row = self._name_of(int(sizes.argmax()) * self.rows_per_item, table)
            what = "tokens" if self.rows_per_item == 1 else "tokens, both sides together,"
            found = f"{row} has {sizes.max()} {what} and {name} is {capacity}"
            raise ConfigError(f"{found}; raise that, or lower data.max_length")


def beyond_vocabulary(token_id: int, vocab_size: int) -> str:
    """Return a text about a token that the model does not have."""
    return (
        f"token id {token_id}, and the model's vocabulary has {vocab_size} tokens: the tokenizer has more than the "
        "model. Use the model's own tokenizer, or enlarge its embedding (resize_token_embeddings of transformers)"
    )


@dataclass(kw_only=True)
class Tally:
    """Numbers of a file's kept, cut and dropped rows."""

    num_read: int
    """rows in the file"""
    max_length: int
    num_kept: int = 0
    """items to train on"""
    num_truncated: int = 0
    """kept items of which a row was cut to max_length"""
    dropped: Counter[str] = field(default_factory=Counter)
    """number of dropped rows by reason"""
    longest: int = 0
    """tokens of the longest row before truncation"""

    def __str__(self) -> str:
        """Return one readable line, such as "253 of 256 rows; 12 cut to max_length=64 ..."."""
        parts = [f"{self.num_kept} of {self.num_read} rows"]
        if self.num_truncated:
            parts.append(f"{self.num_truncated} cut to max_length={self.max_length} (the longest has {self.longest})")
        parts += [f"{count} dropped: {reason}" for reason, count in self.dropped.items()]
        return "; ".join(parts)


def tokenise(num_rows: int, encode: Encode, max_length: int, where: str, rows_per_item: int = 1) -> TokenRows:
    """Tokenise a table once, chunk by chunk, and cut rows longer than `max_length` at their end.

    An item is dropped, and counted, if one of its rows has nothing left to learn (the prompt alone fills `max_length`),
    or if its rows are equal.

    `max_length`: most tokens of one row.
    """
    if max_length < 2:
        raise ConfigError(f"max_length={max_length}: expected at least 2, a token and the one that it predicts")
    kept: list[Tokens] = []
    source: list[int] = []
    tally = Tally(num_read=num_rows, max_length=max_length)
    chunks = [range(start, min(start + _CHUNK, num_rows)) for start in range(0, num_rows, _CHUNK)]
    console = Console(file=sys.stderr)
    is_hidden = num_rows < _LONG or not console.is_terminal
    for chunk in track(chunks, f"tokenising {where}", console=console, transient=True, disable=is_hidden):
        for number, sequences in zip(chunk, encode(chunk), strict=True):
            length = max(len(ids) for ids, _ in sequences)
            tally.longest = max(tally.longest, length)
            cut = [_cut(ids, mask, max_length) for ids, mask in sequences]
            if reason := _fault(cut, max_length):
                tally.dropped[reason] += 1
                continue
            tally.num_kept += 1
            tally.num_truncated += length > max_length
            kept += cut
            source.append(number)
    if not source:
        raise DataError(f"{where}: nothing to train on: {tally}")
    return TokenRows(
        input_ids=np.concatenate([ids for ids, _ in kept]),
        loss_mask=np.concatenate([mask for _, mask in kept]),
        starts=np.cumsum([0, *(len(ids) for ids, _ in kept)], dtype=np.int64),
        source=np.asarray(source, dtype=np.int64),
        rows_per_item=rows_per_item,
        tally=tally,
    )


def mixed(parts: Mapping[str, TokenRows], weights: Mapping[str, float] | None) -> TokenRows:
    """Return the token rows of several sources as one table.

    `weights`: share of each source in an epoch; None: every item occurs once.
    """
    first = next(iter(parts))
    for name, part in parts.items():
        if odd := parts[first].per_row.keys() ^ part.per_row.keys():
            raise DataError(f"mixture: one of {first} and {name} has {', '.join(sorted(odd))}, the other has none")
    sizes = {name: len(part) for name, part in parts.items()}
    mixture = Mixture(sizes, weights or sizes)
    form = f"a mixture of {mixture}: {'; '.join(f'{name} {part.form}' for name, part in parts.items())}"
    return replace(joined(list(parts.values())), form=form, mixture=mixture)


def joined(tables: Sequence[TokenRows]) -> TokenRows:
    """Return token rows end to end. All have the same further keys."""
    per_row = {key: np.concatenate([part.per_row[key] for part in tables]) for key in tables[0].per_row}
    if "pair_ids" in per_row:
        per_row["pair_ids"] = np.repeat(np.arange(sum(map(len, tables))), tables[0].rows_per_item)
    lengths = np.concatenate([part.lengths for part in tables])
    return TokenRows(
        input_ids=np.concatenate([part.input_ids for part in tables]),
        loss_mask=np.concatenate([part.loss_mask for part in tables]),
        starts=np.concatenate([[0], lengths]).cumsum(dtype=np.int64),
        source=np.concatenate([part.source for part in tables]),
        rows_per_item=tables[0].rows_per_item,
        per_row=per_row,
        tally=_total([part.tally for part in tables]),
    )


def _total(tallies: Sequence[Tally]) -> Tally:
    """Return the sums of tallies."""
    return Tally(
        num_read=sum(tally.num_read for tally in tallies),
        max_length=tallies[0].max_length,
        num_kept=sum(tally.num_kept for tally in tallies),
        num_truncated=sum(tally.num_truncated for tally in tallies),
        dropped=sum((tally.dropped for tally in tallies), Counter()),
        longest=max(tally.longest for tally in tallies),
    )


def _cut(ids: np.ndarray, mask: np.ndarray, max_length: int) -> Tokens:
    mask = mask[:max_length].copy()
    mask[:1] = False  # nothing predicts a row's first token
    return ids[:max_length].astype(np.int32, copy=False), mask


def _fault(sequences: Sequence[Tokens], max_length: int) -> str | None:
    """Return why nothing can be learnt from an item, if so."""
    if not all(mask.any() for _, mask in sequences):
        return f"nothing to learn within max_length={max_length}"
    first, *others = [ids for ids, _ in sequences]
    if others and all(np.array_equal(first, ids) for ids in others):
        return f"chosen equals rejected within max_length={max_length}"
    return None


def answer_encoder(
    tokenizer: PreTrainedTokenizerBase, rows: Table, answers: Sequence[str], ends: LearntEnds | None = None
) -> Encode:
    """Return a function that tokenises a raw `prompt` with each of its answers.

    Prompt and answer are tokenised apart, as they are when an answer is generated. An answer ends with one
    end-of-sequence token. Only the answer is learnt.

    `ends`: takes note of the end; None if nobody compares it. Returns a function: row numbers -> for each row, one
    sequence for each answer.
    """
    end = _end_of_sequence(tokenizer, ends)

    def encode(numbers: range) -> list[list[Tokens]]:
        prompts = raw_prompts(tokenizer, [rows[number]["prompt"] for number in numbers])
        columns = [raw_tokens(tokenizer, [rows[number][name] for number in numbers]) for name in answers]
        return [[_ended(prompt, answer, end) for answer in own] for prompt, *own in zip(prompts, *columns, strict=True)]

    return encode


def text_encoder(tokenizer: PreTrainedTokenizerBase, rows: Table, ends: LearntEnds | None = None) -> Encode:
    """Return a function that tokenises the `text` of rows, with one end-of-sequence token. All tokens are learnt.

    `ends`: takes note of the end; None if nobody compares it. Returns a function: row numbers -> for each row, one
    sequence.
    """
    end = _end_of_sequence(tokenizer, ends)

    def encode(numbers: range) -> list[list[Tokens]]:
        return [[_ended([], ids, end)] for ids in raw_prompts(tokenizer, [rows[number]["text"] for number in numbers])]

    return encode


def _ended(prompt: list[int], answer: list[int], end: int) -> Tokens:
    """Return a prompt and its answer, which is learnt, with one end token."""
    ids = [*prompt, *answer] if answer[-1:] == [end] else [*prompt, *answer, end]
    return np.asarray(ids, dtype=np.int32), np.arange(len(ids)) >= len(prompt)


def _end_of_sequence(tokenizer: PreTrainedTokenizerBase, ends: LearntEnds | None) -> int:
    if tokenizer.eos_token_id is None:
        raise ConfigError("the model's tokenizer has no eos_token, which raw responses and texts end with")
    if ends is not None:
        ends.see(tokenizer.eos_token_id)
    return tokenizer.eos_token_id


class BatchLoader:
    """Loader of shuffled batches of token rows, epoch by epoch.

    Iteration continues from the position, which moves when a batch is yielded. A state that is saved while a batch is
    trained on therefore continues with the next batch. Every item occurs once per epoch, except in a mixture with
    weights. The epoch's last batch may be smaller.
    """

    def __init__(self, rows: TokenRows, batch_size: int, seed: int = 0, n_epochs: int = 1) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._num_epochs = n_epochs
        self._order = shuffled(len(rows), rows.mixture, seed, rows.digest)
        self.num_batches = len(self) * n_epochs
        """batches in all epochs"""

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return -(-len(self._rows) // self._batch_size)

    def __str__(self) -> str:
        """Return how many batches there are, in words."""
        return f"{counted(self._num_epochs, 'epoch')} of {len(self)} steps"

    @property
    def num_left(self) -> int:
        """Batches not yielded yet."""
        later = self._num_epochs - self._order.epoch - 1  # -1 at the end, where an epoch would begin
        return max(0, -(-self._order.left_in_epoch // self._batch_size) + later * len(self))

    def __iter__(self) -> Iterator[TensorDict]:
        while self._order.epoch < self._num_epochs:
            yield self._rows.batch(self._order.take(min(self._batch_size, self._order.left_in_epoch)))

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position and a digest of the data."""
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another loader's position."""
        self._order.load_state_dict(state)


class StreamLoader:
    """Loader of a number of shuffled batches of a streamed table, epoch by epoch.

    As with a `BatchLoader`, an epoch's last batch may be smaller.
    """

    def __init__(self, table: StreamedTable[TokenRows], batch_size: int, seed: int, num_batches: int) -> None:
        self._items: ShuffledStream[TokenRows] = ShuffledStream(table, seed)
        self._batch_size = batch_size
        self.num_batches = num_batches
        """batches in all"""
        self._num_dealt = 0

    def __str__(self) -> str:
        """Return how many batches there are, in words."""
        return "epochs of unknown length, steps"

    @property
    def num_left(self) -> int:
        """Batches not yielded yet."""
        return max(self.num_batches - self._num_dealt, 0)

    def __iter__(self) -> Iterator[TensorDict]:
        while self.num_left:
            items = joined(self._items.take(self._batch_size))
            self._num_dealt += 1
            yield items.batch(range(len(items)))

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position and digests of the data that was read."""
        return {**self._items.state_dict(), "num_batches": self._num_dealt}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another loader's position."""
        self._items.load_state_dict(state)
        self._num_dealt = state["num_batches"]
