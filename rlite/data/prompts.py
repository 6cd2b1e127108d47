"""Prompts for rollouts: their order, which a resumed run continues, and their tokens."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np

from rlite.data.readers.streaming import ShuffledStream, check_same
from rlite.data.source import Table
from rlite.errors import ConfigError, DataError, StreamedDataError
from rlite.types import StopReason

CHARACTERS_PER_TOKEN = 16
"""a text with more characters for each token that fits is tokenised piece by piece, until it is surely too long"""


class TooManyTokens(DataError):
    """A text is longer than the model's context."""


class TextTokenizer(Protocol):
    """A Hugging Face tokenizer, as far as raw texts need one."""

    @property
    def bos_token_id(self) -> Any:
        """The token that begins a sequence; None if there is none."""

    def __call__(self, text: Any, **options: Any) -> Any:
        """Tokenise a text, or a list of texts."""


def raw_prompts(tokenizer: TextTokenizer, texts: Sequence[str], limit: int | None = None) -> list[list[int]]:
    """Tokenise raw prompts. Training and generation both use this function, so that a prompt has the same tokens.

    Returns the tokens of each prompt. Each begins, once, with the token that the tokenizer puts before every text
    (Llama's `<|begin_of_text|>`), if there is one.
    """
    bos = tokenizer.bos_token_id
    begin = [bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else []
    tokens = raw_tokens(tokenizer, texts) if limit is None else [bounded_tokens(tokenizer, t, limit) for t in texts]
    return [ids if begin and ids[:1] == begin else begin + ids for ids in tokens]


def raw_tokens(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of texts that continue other texts: no token is put before or after them."""
    # `verbose` warns of texts longer than the model's context; what is too long is counted elsewhere.
    return tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def bounded_tokens(tokenizer: TextTokenizer, text: str, limit: int | None) -> list[int]:
    """Return the tokens of a text that continues another, at a cost that depends on `limit`, not on the text.

    A long text is first tokenised in large pieces. A cut adds few tokens to a piece, so twice as many tokens as fit
    prove that the text does not fit, even if the tokenizer leaves out or merges characters.

    `limit`: tokens that fit into the model's context; None does not bound the text.
    """
    if limit is not None and len(text) > (size := CHARACTERS_PER_TOKEN * max(limit, 1024)):
        count = 0
        for start in range(0, len(text), size):
            count += len(raw_tokens(tokenizer, [text[start : start + size]])[0])
            if count > 2 * max(limit, 1024):
                raise TooManyTokens(f"a text of {len(text)} characters has far more tokens than the {limit} that fit")
    return raw_tokens(tokenizer, [text])[0]


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens, the end token among them."""
    return frozenset(getattr(tokenizer, "all_special_ids", ()))


def end_of(output: Sequence[int], stop_reason: StopReason, end_ids: Collection[int]) -> list[int]:
    """Return the end token with which a model has ended an answer, in a list; an empty list if it wrote none."""
    return [token for token in output[-1:] if stop_reason == "stop" and token in end_ids]


BREAK = f"\U000f1ce5{secrets.randbits(64)}\U000f1ce6"
"""stands within the name of a special token that is plain text; random, so that no text holds it"""


def plain_text(text: str) -> str:
    """Return a rendered text as a person reads it, without BREAK."""
    return text.replace(BREAK, "")


class ShuffledOrder:
    """Endless sequence of the numbers 0 to num_items - 1. Each epoch has another order, given by seed and epoch.

    `position` counts the numbers returned so far; set it to continue from there.

    `digest`: returns a hash of the items. A state belongs to one hash.
    """

    def __init__(self, num_items: int, seed: int, digest: Callable[[], str] | None = None) -> None:
        if num_items < 1:
            raise ConfigError(f"num_items={num_items}: expected at least 1")
        self._digest = cache(digest) if digest is not None else None
        self._num_items = num_items
        self._seed = seed
        self._epoch = -1
        self.position = 0

    @property
    def epoch(self) -> int:
        """Complete epochs so far."""
        return self.position // self._num_items

    @property
    def left_in_epoch(self) -> int:
        """Numbers left in the current epoch, at least one."""
        return self._num_items - self.position % self._num_items

    def take(self, count: int) -> list[int]:
        """Return the next `count` numbers; they may span epochs."""
        taken = [self._number(place) for place in range(self.position, self.position + count)]
        self.position += count
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the position: seed, epoch, offset in the epoch, and number and hash of the items it holds for."""
        epoch, offset = divmod(self.position, self._num_items)
        state = {"seed": self._seed, "epoch": epoch, "offset": offset, "num_items": self._num_items}
        return state if self._digest is None else {**state, "content": self._digest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another order's position, with its seed."""
        check_same("num_items" in state, "with streaming", "with it")
        made = f"with {state['num_items']} items of data; now there are {self._num_items}"
        check_same(state["num_items"] == self._num_items, made, "with the same data and max_length")
        made = "with as many items of data, but with another content or in another order"
        note = "the ends of answers in a checkpoint of an earlier version (sft, rm, dpo, kto) need data.end_token=keep"
        is_same = self._digest is None or state.get("content", digest := self._digest()) == digest
        check_same(is_same, made, "with the same data, tokenizer and max_length", f"; {note}")
        self._seed = state["seed"]
        self._epoch = -1
        self.position = state["epoch"] * self._num_items + state["offset"]

    def _number(self, place: int) -> int:
        epoch, offset = divmod(place, self._num_items)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(self._num_items)
        return int(self._permutation[offset])


MAX_ITEM = 200
"""characters of a row's name"""


class Prompt(dict[str, Any]):
    """A row of the data, with its name in the record of a run."""

    def __init__(self, row: Mapping[str, Any], item: str) -> None:
        super().__init__(row)
        self.item = item


def item_name(row: Mapping[str, Any], number: int | str) -> str:
    """Return the name of a row in records: its `id`, else its index in the data, or its place if it is streamed."""
    name = row.get("id")
    return str(number if name is None else name)[:MAX_ITEM]


class PromptStream:
    """Endless batches of rows: each epoch in another order that depends only on seed and epoch.

    `rows`: the table; not read if it is streamed.
    """

    def __init__(self, rows: Table, batch_size: int, order: ShuffledOrder | ShuffledStream[Mapping[str, Any]]) -> None:
        self._rows, self._batch_size = rows, batch_size
        self.order = order
        """order of the rows; its `position` counts the rows returned so far, unless they are streamed"""
        self.returned: list[Prompt] = []
        """rows that come before all others: they were returned before, and not used"""

    def next(self, count: int | None = None) -> list[Prompt]:
        """Return the next `batch_size` rows, or `count` of them; a batch may span two epochs."""
        count = self._batch_size if count is None else count
        new = self._take(max(count - len(self.returned), 0))
        first, self.returned = self.returned[:count], self.returned[count:]
        return first + new

    def _take(self, count: int) -> list[Prompt]:
        if isinstance(self.order, ShuffledOrder):
            return [Prompt(row, item_name(row, n)) for n in self.order.take(count) for row in [self._rows[n]]]
        taken: list[Prompt] = []
        while len(taken) < count:
            try:
                placed = self.order.take_placed(count - len(taken))
            except StreamedDataError:
                self.returned = taken + self.returned
                raise
            taken += [Prompt(row, item_name(row, f"{file}:{place}")) for (file, place), row in placed]
        return taken

    def __iter__(self) -> Iterator[list[Prompt]]:
        """Yield batches forever; the first has all `returned` rows, if there are some."""
        while True:
            yield self.next(len(self.returned) or None)

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's position and a digest of the rows."""
        return self.order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another stream's position."""
        self.order.load_state_dict(state)
