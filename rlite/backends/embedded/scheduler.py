"""Scheduler of continuous batching, without torch: admission, prefill order and length of decode bursts.

A sequence's life:   waiting --admit--> running (prefill, then decode) --record--> finished

Running sequences are compact: `running[i]` lives in slot i of the KV cache, so that the decode batch is a view of the
cache. They are kept roughly longest first. When a sequence ends, the last sequence takes its slot. The owner of the
cache performs this `Move`.

The slots behind the running sequences keep the keys and values of ended sequences until others need the room. The
next turn of a session, and any request that begins like an earlier one, continues from them.

Prefill stops one token short: it fills the cache for all tokens but the last. The decode step that reads the last token
generates the first new token. Only decode steps compute logits. Siblings that copy a prompt's cache need no other
state. Recomputing the cache after new weights is a prefill of prompt and completion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from rlite.backends.serving.sampler import Sampling
from rlite.data.routing import ROUTED
from rlite.types import SequenceRequest, StopReason, TokenChunk

NO_EXTRAS: Mapping[str, Sequence[Sequence[Any]]] = MappingProxyType({})
MIN_SHARED = 32
"""least number of leading tokens that a kept cache must share"""
MIN_SHARE = 0.25
"""least share of all tokens; tokens that are prefilled behind others need a slower kernel than whole prompts"""


@dataclass(eq=False, slots=True)
class RunningSequence:
    """One request with its tokens so far."""

    request: SequenceRequest
    tokens: list[int]
    """prompt and completion"""
    max_tokens: int
    """length in tokens at which the sequence ends"""
    stop_ids: frozenset[int]
    """tokens that end the sequence"""
    min_tokens: int
    """length in tokens before which no stop token may be generated"""
    slot: int = -1
    num_cached: int = 0
    """number of leading tokens whose keys and values are in the slot"""
    num_reported: int = 0
    """number of leading tokens, prompt included, that the driver knows"""
    logprobs: list[float] = field(default_factory=list)
    """log-probabilities of the tokens that are not reported yet"""
    sampling_logprobs: list[float] = field(default_factory=list)
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """columns of the tokens that are not reported yet, as far as the request asks for them"""
    has_failed: bool = False
    """true if keys or values of the sequence are not finite"""
    is_ahead: bool = False
    """true if the slot also holds tokens that were cut off: keys and values are ignored, a recurrent state is not"""
    prompt_key: bytes = field(init=False)
    """equal for sequences of equal prompts"""

    def __post_init__(self) -> None:
        # Python hashes bytes once, and a tuple at each look-up
        self.prompt_key = np.asarray(self.request.input_ids, dtype=np.int64).tobytes()

    @property
    def prompt_len(self) -> int:
        """Number of tokens in the prompt."""
        return len(self.request.input_ids)

    @property
    def has_kept_ids(self) -> bool:
        """True if the request asks for kept ids."""
        return "kept_ids" in self.request.extras

    @property
    def has_routing(self) -> bool:
        """True if the request asks for the chosen experts."""
        return ROUTED in self.request.extras

    @property
    def sampling(self) -> Sampling:
        """Parameters by which the next token is sampled."""
        is_early = len(self.tokens) < self.min_tokens
        return Sampling(self.request.gconfig, self.request.seed, self.stop_ids, is_early, self.has_kept_ids)

    @property
    def room(self) -> int:
        """Number of tokens before the sequence ends, or before the tokens that it may sample change."""
        length = len(self.tokens)
        return min((limit - length for limit in (self.min_tokens, self.max_tokens) if length < limit), default=1)

    @property
    def is_prefilled(self) -> bool:
        """True if the cache holds all tokens but the last."""
        return self.num_cached >= len(self.tokens) - 1


class Chunk(NamedTuple):
    """Tokens [start, stop) of the sequence in `slot` that one forward prefills."""

    slot: int
    start: int
    stop: int
    tokens: Sequence[int]
    num_padding: int = 0
    """positions before `stop` that hold no token. Later tokens overwrite their keys and values before they are read"""


class Move(NamedTuple):
    """Copy the first `length` positions of slot `source` to slot `target`."""

    source: int
    target: int
    length: int


class _Kept(NamedTuple):
    tokens: np.ndarray
    """the leading tokens whose keys and values are in the slot"""
    used: int
    """time of the last use; the cache with the lowest is evicted first"""


class KeptCaches:
    """Keys and values of ended sequences, in the slots behind the running ones, from which later requests continue.

    Args:
        num_slots: number of slots; 0 keeps nothing.
        has_state: the slots also hold recurrent states, so that a cache is continued from its end, not from its middle.
    """

    def __init__(self, num_slots: int, has_state: bool = False) -> None:
        self._num_slots, self._has_state = num_slots, has_state
        self._slots: dict[int, _Kept] = {}
        self._clock = count()

    def clear(self) -> None:
        """Forget all contents."""
        self._slots.clear()

    def keep(self, tokens: Sequence[int], slot: int, first_free: int) -> list[Move]:
        """Keep the cache of a sequence that has ended.

        Args:
            tokens: the leading tokens whose keys and values the slot holds.
            slot: the sequence's slot.
            first_free: this slot and all behind it belong to no running sequence. If `slot` is before it, the cache is
                copied to one of them, and the least recently used one is evicted if none is empty.

        Returns:
            The copies.
        """
        if len(tokens) < MIN_SHARED or slot >= self._num_slots:
            return []
        target = slot if slot >= first_free else self._vacate(first_free)
        if target is None:
            return []
        self._slots[target] = _Kept(np.asarray(tokens, dtype=np.int64), next(self._clock))
        return [] if target == slot else [Move(slot, target, len(tokens))]

    def take(self, tokens: Sequence[int], slot: int) -> tuple[int, list[Move]]:
        """Fill a new sequence's slot from the cache that shares most of its leading tokens.

        A cache of which all tokens are shared moves to the slot, because its session goes on there. Otherwise it is
        copied.

        Args:
            tokens: the tokens whose keys and values are wanted.
            slot: the new sequence's slot. All slots behind it belong to no running sequence.

        Returns:
            The number of leading tokens whose keys and values the slot holds after the copies; and the copies.
        """
        if not self._slots:
            return 0, []
        source, num_shared = self._best(np.asarray(tokens, dtype=np.int64))
        here = self._slots.pop(slot, None)
        if source == slot:
            return num_shared, []
        moves: list[Move] = []
        if here is not None and (target := self._vacate(slot + 1, source, here.used)) is not None:
            self._slots[target] = here
            moves.append(Move(slot, target, len(here.tokens)))
        if source is not None:
            found = self._slots.pop(source)
            if num_shared < len(found.tokens):
                self._slots[source] = found._replace(used=next(self._clock))
            moves.append(Move(source, slot, num_shared))
        return num_shared, moves

    def _best(self, tokens: np.ndarray) -> tuple[int | None, int]:
        """Return the slot with the longest shared prefix that is worth copying, and its length; None and 0 if none."""
        least, best = max(MIN_SHARED, int(MIN_SHARE * len(tokens))), None
        for slot, kept in self._slots.items():
            length = min(len(tokens), len(kept.tokens))
            if length >= least and kept.tokens[0] == tokens[0]:
                differs = kept.tokens[:length] != tokens[:length]
                num_shared = int(differs.argmax()) if differs.any() else length
                if num_shared >= least and (num_shared == len(kept.tokens) or not self._has_state):
                    least, best = num_shared + 1, slot
        return best, 0 if best is None else least - 1

    def _vacate(self, first: int, spared: int | None = None, younger_than: int | None = None) -> int | None:
        """Return an empty slot, or else evict the least recently used cache.

        Args:
            first: first slot to consider.
            spared: a slot that is not evicted.
            younger_than: time of use; a cache that was used later is not evicted.
        """
        for slot in range(first, self._num_slots):
            if slot not in self._slots:
                return slot
        others = [slot for slot in self._slots if slot >= first and slot != spared]
        oldest = min(others, key=lambda slot: self._slots[slot].used, default=None)
        if oldest is None or (younger_than is not None and self._slots[oldest].used > younger_than):
            return None
        del self._slots[oldest]
        return oldest


class Scheduler:
    """The queues and slots of one worker.

    Args:
        num_slots: number of slots.
        max_prefill_tokens: number of tokens of one prefill forward.
        keeps_caches: later sequences may continue from the cache of sequences that have ended.
        has_state: the slots also hold recurrent states. A state belongs to all tokens that were computed, so siblings
            copy it when exactly their prompt is prefilled.
    """

    def __init__(
        self, num_slots: int, max_prefill_tokens: int, keeps_caches: bool = True, has_state: bool = False
    ) -> None:
        self.num_slots, self.max_prefill_tokens = num_slots, max_prefill_tokens
        self._keeps_caches, self._has_state = keeps_caches, has_state
        self.num_reused = 0
        """number of tokens that were not prefilled again"""
        self._kept = KeptCaches(num_slots if keeps_caches else 0, has_state)
        self.waiting: deque[RunningSequence] = deque()
        self.running: list[RunningSequence] = []
        self._ended: list[tuple[RunningSequence, StopReason]] = []

    def add(self, sequence: RunningSequence) -> None:
        """Append a sequence to the waiting queue."""
        self.waiting.append(sequence)

    def admit(self) -> list[Move]:
        """Move waiting sequences into free slots in queue order. Sequences of one call are placed longest first.

        Returns:
            The copies of kept caches from which some of them continue.
        """
        num = min(self.num_slots - len(self.running), len(self.waiting))
        admitted = [self.waiting.popleft() for _ in range(num)]
        moves: list[Move] = []
        for sequence in sorted(admitted, key=lambda s: -len(s.tokens)):
            sequence.slot = len(self.running)
            self.running.append(sequence)
            sequence.num_cached, copies = self._kept.take(sequence.tokens[:-1], sequence.slot)
            self.num_reused += sequence.num_cached
            moves += copies
        return moves

    def next_prefill(self) -> tuple[list[Move], list[Chunk]]:
        """Return the next cache copies, and the chunks of the forward that follows them. Both are empty at the end.

        The chunks hold at most `max_prefill_tokens` tokens. A prompt that another running sequence shares is copied
        from this sequence, as soon as its prompt is prefilled. Only a prompt longer than `max_prefill_tokens` is split,
        because a chunk that attends to an earlier chunk needs a slower kernel.
        """
        moves: list[Move] = []
        chunks: list[Chunk] = []
        todo = [sequence for sequence in self.running if not sequence.is_prefilled]
        if not todo:
            return moves, chunks
        owners = {s.prompt_key: s for s in reversed(self.running) if self._has_prompt(s)}
        budget = self.max_prefill_tokens
        # the furthest of several siblings leads, so that a prompt in the middle of its chunks is not begun again
        for sequence in sorted(todo, key=lambda s: -s.num_cached):
            shared = 0 if self._has_state and not self._keeps_caches else sequence.prompt_len - 1
            if is_in_prompt := sequence.num_cached < shared:
                owner = owners.setdefault(sequence.prompt_key, sequence)
                if owner is not sequence:
                    if owner.num_cached < shared:
                        continue
                    moves.append(Move(owner.slot, sequence.slot, shared))
                    sequence.num_cached, is_in_prompt = shared, False
            start, end = sequence.num_cached, len(sequence.tokens) - 1
            if self._has_state and is_in_prompt:
                end = shared  # where siblings copy the state
            if budget < end - start <= self.max_prefill_tokens:
                continue  # the next forward holds it whole
            stop = min(end, start + budget)
            if stop > start:
                chunks.append(Chunk(sequence.slot, start, stop, sequence.tokens[start:stop]))
                budget -= stop - start
        # a sequence is a source only from the next round on: its cache is written by this round's forward
        for chunk in chunks:
            self.running[chunk.slot].num_cached = chunk.stop
        return moves, chunks

    def _has_prompt(self, sequence: RunningSequence) -> bool:
        """Return whether siblings can copy the prompt of a running sequence."""
        return sequence.num_cached == sequence.prompt_len - 1 if self._has_state else sequence.is_prefilled

    def burst(self, max_steps: int) -> int:
        """Return the number of decode steps before the batch, or the tokens that a row may sample, can change.

        Stop tokens and stop strings may end a row earlier.
        """
        return min([max_steps, *(sequence.room for sequence in self.running)])

    def record(
        self,
        tokens: list[list[int]],
        logprobs: list[list[float]],
        sampling_logprobs: list[list[float]],
        find_stop: Callable[[RunningSequence, int], int | None],
        extras: Mapping[str, Sequence[Sequence[Any]]] = NO_EXTRAS,
    ) -> list[Move]:
        """Append the tokens of one burst, end finished sequences, and close the gaps.

        Args:
            tokens: `[row][step]`.
            logprobs: `[row][step]`, at the row's temperature.
            sampling_logprobs: `[row][step]`, under the truncated distribution.
            find_stop: `find_stop(sequence, start)` returns the length at which a completion contains a stop string, or
                None. It is called for requests with stop strings; tokens from `start` on are new.
            extras: columns `[row][step]` by name, for requests that ask for them.

        Returns:
            The copies of slots that close the gaps.
        """
        finished: list[tuple[RunningSequence, StopReason]] = []
        for row, (sequence, made) in enumerate(zip(self.running, tokens, strict=True)):
            start, num = len(sequence.tokens), len(made)
            reason: StopReason | None = None
            if not sequence.stop_ids.isdisjoint(made):
                num = next(i for i, token in enumerate(made, start=1) if token in sequence.stop_ids)
                reason = "stop"
            sequence.tokens += made[:num]
            if sequence.request.gconfig.stop and (length := find_stop(sequence, start)) is not None:
                num, reason = length - start, "stop"
                del sequence.tokens[length:]
            sequence.num_cached, sequence.is_ahead = len(sequence.tokens) - 1, num < len(made)
            sequence.logprobs += logprobs[row][:num]
            sequence.sampling_logprobs += sampling_logprobs[row][:num]
            for name in extras.keys() & sequence.request.extras:
                sequence.extras.setdefault(name, []).extend(extras[name][row][:num])
            if reason is None and len(sequence.tokens) >= sequence.max_tokens:
                reason = "length"
            if reason is not None:
                finished.append((sequence, reason))
        return self._remove(finished) if finished else []

    def abort(self, request_ids: Collection[int]) -> list[Move]:
        """End requests with their tokens so far. Unknown numbers are ignored.

        Args:
            request_ids: request numbers.

        Returns:
            The copies of slots that close the gaps.
        """
        self._ended += [(s, "abort") for s in self.waiting if s.request.request_id in request_ids]
        self.waiting = deque(s for s in self.waiting if s.request.request_id not in request_ids)
        return self._remove([(s, "abort") for s in self.running if s.request.request_id in request_ids])

    def forget_cache(self) -> None:
        """Mark the cache as empty. Every running sequence is prefilled again."""
        self._kept.clear()
        for sequence in self.running:
            sequence.num_cached = 0

    def drain(self, version: int) -> list[TokenChunk]:
        """Return one chunk for each request that made progress or ended since the last drain."""
        ended, self._ended = self._ended, []
        chunks = [_report(sequence, version, reason) for sequence, reason in ended]
        chunks += [_report(s, version, None) for s in self.running if len(s.tokens) > s.num_reported]
        return chunks

    def _cached_tokens(self, sequence: RunningSequence) -> list[int]:
        """Return the leading tokens whose cache later sequences may continue."""
        is_lost = sequence.has_failed or (sequence.is_ahead and self._has_state)
        return [] if is_lost else sequence.tokens[: sequence.num_cached]

    def _remove(self, finished: list[tuple[RunningSequence, StopReason]]) -> list[Move]:
        self._ended += finished
        gone = {sequence.slot: sequence for sequence, _ in finished}
        moves: list[Move] = []
        for slot in sorted(gone):
            while self.running and (ended := gone.pop(self.running[-1].slot, None)) is not None:
                self.running.pop()
                self._kept.keep(self._cached_tokens(ended), ended.slot, ended.slot)
            if slot not in gone:
                break
            last, ended = self.running.pop(), gone.pop(slot)
            moves += self._kept.keep(self._cached_tokens(ended), slot, last.slot + 1)
            moves.append(Move(last.slot, slot, last.num_cached))
            last.slot = slot
            self.running[slot] = last
        return moves


def _report(sequence: RunningSequence, version: int, reason: StopReason | None) -> TokenChunk:
    chunk = TokenChunk(
        request_id=sequence.request.request_id,
        token_ids=sequence.tokens[sequence.num_reported :],
        logprobs=sequence.logprobs,
        sampling_logprobs=sequence.sampling_logprobs,
        version=version,
        finish_reason=reason,
        extras={name: sequence.extras.get(name, []) for name in sequence.request.extras},
    )
    sequence.num_reported = len(sequence.tokens)
    sequence.logprobs, sequence.sampling_logprobs, sequence.extras = [], [], {}
    return chunk
