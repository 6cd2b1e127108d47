"""Scheduler of continuous batching, without torch: admission, prefill order and length of decode bursts.

A sequence's life:   waiting --admit--> running (prefill, then decode) --record--> finished
                        ^----------------- preempt or forget_cache

A running sequence has a row of the batch and pages of the KV cache, as many as its tokens need. Rows are compact and
roughly longest first: when a sequence ends, the last sequence takes its row. If the pages run out, the youngest
sequence waits again with the tokens that it has.

A sequence begins with the pages that hold its first tokens already: those of its siblings' prompt, of the earlier turns
of its session, or of any request that began alike (see `pages`). Siblings wait until the first of them has filled the
pages of their prompt.

Prefill stops one token short: it fills the cache for all tokens but the last. The decode step that reads the last token
generates the first new token. Only decode steps compute logits. Recomputing the cache after new weights is a prefill of
prompt and completion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from rlite.backends.embedded.pages import PAGE, TRASH, Node, PagePool, Prefix, num_pages
from rlite.backends.serving.sampler import Sampling
from rlite.data.routing import ROUTED
from rlite.types import SequenceRequest, StopReason, TokenChunk

NO_EXTRAS: Mapping[str, Sequence[Sequence[Any]]] = MappingProxyType({})
MIN_SHARED = 32
"""least number of leading tokens that must be in the cache, unless they are a whole prompt"""
MIN_SHARE = 0.25
"""least share of all tokens; tokens that are prefilled behind others need a slower kernel than whole prompts"""
SPARE_ROWS = 4
"""running sequences for which a page stays free when another is admitted"""
BURST = 64
"""most decode steps of a burst, for which pages are allocated ahead"""


_serials = count()


@dataclass(eq=False)
class ServedAdapter:
    """One version of an adapter."""

    name: str | None
    """None is the adapter of requests that name none"""
    version: int
    scale: float
    factors: Mapping[Any, Any]
    """`LocalFactors` by layer"""
    root: Node = field(default_factory=lambda: Node(b"", TRASH))
    """root of the prefixes that were computed with it"""
    key: bytes = field(default_factory=lambda: b"adapter %d" % next(_serials))
    """text that no other version has"""


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
    adapter: ServedAdapter | None = None
    """adapter with which its tokens are computed"""
    row: int = -1
    pages: list[int] = field(default_factory=list)
    """pages of the cache, in the order of the tokens"""
    age: int = 0
    """number of sequences that were added before"""
    num_cached: int = 0
    """number of leading tokens whose keys and values are in the pages"""
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
    """true if the cache also holds tokens that were cut off: keys and values are ignored, a recurrent state is not"""
    prompt_key: bytes = field(init=False)
    """equal for sequences of equal prompts and of one adapter"""

    def __post_init__(self) -> None:
        self.take_adapter(self.adapter)

    def take_adapter(self, adapter: ServedAdapter | None) -> None:
        """Let an adapter compute the next tokens; None is the base alone."""
        self.adapter = adapter
        # Python hashes bytes once, and a tuple at each look-up
        self.prompt_key = np.asarray(self.request.input_ids, dtype=np.int64).tobytes()
        if adapter is not None:
            self.prompt_key += adapter.key

    @property
    def root(self) -> Node | None:
        """Root of the prefixes that were computed with its adapter."""
        return None if self.adapter is None else self.adapter.root

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
    def has_prompt(self) -> bool:
        """True if the cache holds all tokens of the prompt but the last."""
        return self.num_cached >= self.prompt_len - 1

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
    """Tokens [start, stop) of the sequence in `row` that one forward prefills."""

    row: int
    start: int
    stop: int
    tokens: Sequence[int]
    num_padding: int = 0
    """positions before `stop` that hold no token. Later tokens overwrite their keys and values before they are read"""
    pages: Sequence[int] = ()
    """pages of the sequence"""


class Copies(NamedTuple):
    """Copies (source, target) that precede a forward pass, each kind one after the other."""

    pages: list[tuple[int, int]]
    states: list[tuple[int, int]]
    """slots of recurrent states: that of a running sequence is its row"""


class Scheduler:
    """The queue, rows and pages of one worker.

    `keeps_caches`: later sequences may continue from what decode steps wrote. Otherwise only prompts are shared, and a
    sequence gets all its pages at once, so that it is never recomputed. `has_state`: sequences also have recurrent
    states. A state belongs to all tokens that were computed, so a sequence continues from a kept state: at the end of a
    prompt with siblings, at the last page border of a prompt if there is a free slot, or where a sequence ended.
    """

    def __init__(
        self, num_rows: int, max_prefill_tokens: int, num_pages: int, keeps_caches: bool = True, has_state: bool = False
    ) -> None:
        self.num_rows, self.max_prefill_tokens = num_rows, max_prefill_tokens
        self._keeps_caches, self._has_state = keeps_caches, has_state
        self._shares = keeps_caches or not has_state
        self.num_reused = 0
        """number of tokens that were not prefilled again"""
        self.num_preempted = 0
        """number of times that a sequence lost its pages to older ones"""
        states = range(num_rows, 2 * num_rows) if has_state and keeps_caches else range(0)
        self.pool = PagePool(num_pages, 2 * num_rows, not keeps_caches, states)
        self.waiting: deque[RunningSequence] = deque()
        self.running: list[RunningSequence] = []
        self._filled: list[RunningSequence] = []
        """sequences that the last prefill forward computed"""
        self._copies = Copies([], [])
        self._ended: list[tuple[RunningSequence, StopReason]] = []
        self._ages = count()

    def add(self, sequence: RunningSequence) -> None:
        """Append a sequence to the waiting queue."""
        sequence.age = next(self._ages)
        self.waiting.append(sequence)

    def next_prefill(self) -> tuple[Copies, list[Chunk]]:
        """Admit waiting sequences, and return the next copies and the chunks of the forward that follows them.

        The chunks hold at most `max_prefill_tokens` tokens. Only a prompt longer than `max_prefill_tokens` is split,
        because a chunk that attends to an earlier chunk needs a slower kernel.

        Returns the copies and chunks. No chunks are left at the end, when the copies precede decode steps.
        """
        for sequence in self._filled:
            self._share_prompt(sequence)
        self._admit()
        chunks: list[Chunk] = []
        budget = self.max_prefill_tokens
        todo = [sequence for sequence in self.running if not sequence.is_prefilled]
        # a prompt in the middle of its chunks comes first
        for sequence in sorted(todo, key=lambda s: -s.num_cached):
            start, end = sequence.num_cached, self._next_end(sequence)
            if budget < end - start <= self.max_prefill_tokens:
                continue  # the next forward holds it whole
            stop = min(end, start + budget)
            if stop > start:
                chunks.append(Chunk(sequence.row, start, stop, sequence.tokens[start:stop], pages=sequence.pages))
                budget -= stop - start
        self._filled = [self.running[chunk.row] for chunk in chunks]
        for chunk in chunks:
            self.running[chunk.row].num_cached = chunk.stop
        return self.take_copies(), chunks

    def take_copies(self) -> Copies:
        """Return the copies that must precede the next forward pass."""
        copies, self._copies = self._copies, Copies([], [])
        return copies

    def _admit(self) -> None:
        """Move waiting sequences into free rows in queue order, as long as there are pages.

        Sequences of one call are placed longest first. Siblings of a sequence that is being prefilled wait.
        """
        room = min(self.num_rows - len(self.running), len(self.waiting))
        begun = {s.prompt_key for s in self.running if not s.has_prompt} if room and self._shares else set()
        admitted: list[tuple[RunningSequence, Prefix]] = []
        siblings: list[RunningSequence] = []
        while len(admitted) + len(siblings) < room:
            sequence = self.waiting.popleft()
            if sequence.prompt_key in begun:
                siblings.append(sequence)
                continue
            if (prefix := self._begin(sequence, len(self.running) + len(admitted))) is None:
                self.waiting.appendleft(sequence)
                break
            admitted.append((sequence, prefix))
            if self._shares and not sequence.has_prompt:
                begun.add(sequence.prompt_key)
        self.waiting.extendleft(reversed(siblings))
        for sequence, prefix in sorted(admitted, key=lambda pair: -len(pair[0].tokens)):
            sequence.row = len(self.running)
            self.running.append(sequence)
            if prefix.state is not None:
                self._copies.states.append((prefix.state, sequence.row))

    def _begin(self, sequence: RunningSequence, num_others: int) -> Prefix | None:
        """Give a sequence its pages.

        Returns the prefix that the pages hold after the copies; None if there are too few pages.
        """
        wanted, prefix = len(sequence.tokens) - 1, Prefix()
        if self._shares and wanted:
            found = self.pool.match(sequence.tokens[:-1], sequence.root)
            if found.num_tokens >= min(max(MIN_SHARED, int(MIN_SHARE * wanted)), sequence.prompt_len - 1):
                prefix = found
        # preemption under decode steps would change bits in the mode without kept caches
        length = len(sequence.tokens) if self._keeps_caches else sequence.max_tokens
        num_new = num_pages(length) - len(prefix.pages)
        self.pool.hold(prefix.pages)
        # soon, some of the others will need another page
        if num_new + num_others // SPARE_ROWS > self.pool.num_available:
            self.pool.release(prefix.pages)
            return None
        sequence.pages = [*prefix.pages, *self.pool.allocate(num_new)]
        if prefix.tail is not None:
            self._copies.pages.append((prefix.tail, sequence.pages[len(prefix.pages)]))
        sequence.num_cached = prefix.num_tokens
        self.num_reused += prefix.num_tokens
        return prefix

    def _next_end(self, sequence: RunningSequence) -> int:
        """Return the end of a sequence's next chunk: where a state is kept, or else of all tokens to prefill."""
        prompt_end = sequence.prompt_len - 1
        borders = (prompt_end - prompt_end % PAGE, prompt_end) if self._has_state and self._shares else ()
        return next((end for end in borders if end > sequence.num_cached), len(sequence.tokens) - 1)

    def _share_prompt(self, sequence: RunningSequence) -> None:
        """Make the tokens that were prefilled known to other sequences."""
        prompt_end, num = sequence.prompt_len - 1, sequence.num_cached
        if not self._shares:
            return
        if not self._keeps_caches:
            num = min(num, prompt_end)
        has_tail = num == prompt_end or (num > prompt_end and not self._has_state)
        node = self.pool.insert(sequence.tokens[:num], sequence.pages, has_tail, sequence.root)
        if num == prompt_end and self._has_state and any(s.prompt_key == sequence.prompt_key for s in self.waiting):
            self._keep_state(node, sequence)
        elif num % PAGE == 0:
            self._keep_state(node, sequence, may_evict=False)

    def _share_all(self, sequence: RunningSequence) -> None:
        """Make all tokens of a sequence known that leaves its row."""
        is_lost = sequence.has_failed or (sequence.is_ahead and self._has_state)
        if self._keeps_caches and not is_lost and sequence.num_cached >= MIN_SHARED:
            node = self.pool.insert(sequence.tokens[: sequence.num_cached], sequence.pages, True, sequence.root)
            self._keep_state(node, sequence)

    def _keep_state(self, node: Node, sequence: RunningSequence, may_evict: bool = True) -> None:
        if self._has_state and (slot := self.pool.keep_state(node, may_evict)) is not None:
            self._copies.states.append((sequence.row, slot))

    def burst(self, max_steps: int) -> int:
        """Return the number of decode steps before the batch, or the tokens that a row may sample, can change.

        The running sequences have pages for these steps. If there are too few pages for a step, the youngest sequences
        wait again, and there may be copies. Stop tokens and stop strings may end a row earlier.
        """
        steps = min([max_steps, BURST, *(sequence.room for sequence in self.running)])
        while not self.reserve(steps):
            if steps > 1:
                steps //= 2
            else:
                self._preempt(max(self.running, key=lambda s: s.age))
        return steps

    def reserve(self, steps: int) -> bool:
        """Give the running sequences the pages of so many steps, or none if there are too few.

        Returns True if they have the pages.
        """
        missing = [max(0, num_pages(len(s.tokens) - 1 + steps) - len(s.pages)) for s in self.running]
        if sum(missing) > self.pool.num_available:
            return False
        if any(missing):
            for sequence, num in zip(self.running, missing, strict=True):
                sequence.pages += self.pool.allocate(num)
        return True

    def _preempt(self, sequence: RunningSequence) -> None:
        self.num_preempted += 1
        self._share_all(sequence)
        self._leave(sequence)
        sequence.num_cached = 0
        self.waiting.appendleft(sequence)

    def record(
        self,
        tokens: list[list[int]],
        logprobs: list[list[float]],
        sampling_logprobs: list[list[float]],
        find_stop: Callable[[RunningSequence, int], int | None],
        extras: Mapping[str, Sequence[Sequence[Any]]] = NO_EXTRAS,
    ) -> None:
        """Append the tokens of one burst, end finished sequences, and close the gaps.

        `tokens`: `[row][step]`. `logprobs`: `[row][step]`, at the row's temperature. `sampling_logprobs`:
        `[row][step]`, under the truncated distribution. `find_stop`: `find_stop(sequence, start)` returns the length at
        which a completion contains a stop string, or None. It is called for requests with stop strings; tokens from
        `start` on are new. `extras`: columns `[row][step]` by name, for requests that ask for them.
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
        self._remove(finished)

    def abort(self, request_ids: Collection[int]) -> None:
        """End requests with their tokens so far. Unknown numbers are ignored."""
        self._ended += [(s, "abort") for s in self.waiting if s.request.request_id in request_ids]
        self.waiting = deque(s for s in self.waiting if s.request.request_id not in request_ids)
        self._remove([(s, "abort") for s in self.running if s.request.request_id in request_ids])

    def forget_cache(self) -> None:
        """Mark the cache as empty. Every running sequence waits to be prefilled again."""
        self.pool.forget()
        for sequence in reversed(self.running):
            self.pool.release(sequence.pages)
            sequence.pages, sequence.num_cached = [], 0
        self.waiting.extendleft(reversed(self.running))
        self.running, self._filled, self._copies = [], [], Copies([], [])

    def change_adapter(self, name: str | None, adapter: ServedAdapter | None) -> None:
        """Let the sequences of an adapter go on with another version of it. Their cache is recomputed.

        `name`: name of the adapter; None is that of requests that name none. `adapter`: the version; None is the base
        alone.
        """
        moved = [sequence for sequence in self.running if sequence.request.adapter == name]
        self._filled = [sequence for sequence in self._filled if sequence not in moved]
        for sequence in sorted(moved, key=lambda s: -s.row):
            self._leave(sequence)
            sequence.num_cached = 0
        self.waiting.extendleft(sorted(moved, key=lambda s: -s.age))
        for sequence in self.waiting:
            if sequence.request.adapter == name:
                sequence.take_adapter(adapter)

    def drain(self, version: int) -> list[TokenChunk]:
        """Return one chunk for each request that made progress or ended since the last drain."""
        ended, self._ended = self._ended, []
        chunks = [_report(sequence, version, reason) for sequence, reason in ended]
        others = (s for queue in (self.running, self.waiting) for s in queue if len(s.tokens) > s.num_reported)
        return chunks + [_report(sequence, version, None) for sequence in others]

    def _remove(self, finished: list[tuple[RunningSequence, StopReason]]) -> None:
        self._ended += finished
        if any(sequence.has_failed for sequence, _ in finished):
            self.pool.forget()  # what is known may not be finite
        # from the last row on, so that the one that takes a row goes on
        for sequence, _ in sorted(finished, key=lambda pair: -pair[0].row):
            self._share_all(sequence)
            self._leave(sequence)

    def _leave(self, sequence: RunningSequence) -> None:
        """Give back the row and the pages of a sequence. The last row's sequence takes the row."""
        self.pool.release(sequence.pages)
        sequence.pages = []
        last = self.running.pop()
        if last is not sequence:
            if self._has_state:
                self._copies.states.append((last.row, sequence.row))
            last.row = sequence.row
            self.running[last.row] = last


def _report(sequence: RunningSequence, version: int, reason: StopReason | None) -> TokenChunk:
    chunk = TokenChunk(
        request_id=sequence.request.request_id,
        token_ids=sequence.tokens[sequence.num_reported :],
        logprobs=sequence.logprobs,
        sampling_logprobs=sequence.sampling_logprobs,
        version=version if sequence.adapter is None else sequence.adapter.version,
        finish_reason=reason,
        extras={name: sequence.extras.get(name, []) for name in sequence.request.extras},
    )
    sequence.num_reported = len(sequence.tokens)
    sequence.logprobs, sequence.sampling_logprobs, sequence.extras = [], [], {}
    return chunk
