"""Speculation without a draft model: texts propose how a sequence continues, and one forward pass checks the proposal.

Samples of one prompt, and the turns of a conversation, repeat each other. If the last tokens of a sequence occurred
before, in itself or in a text that begins alike, the tokens that followed there are proposed (prompt look-up, Saxena
2023; suffix decoding, Oliaro et al. 2024, arXiv 2411.04975).

The check computes the logits behind the last token and behind each proposed token, and samples from all of them with
the random numbers of their positions. Tokens are kept as long as the token before them was proposed. So each kept token
is sampled from the model's own distribution, with the random number that a step of its own would have used.

This module imports no torch. Its decisions depend on tokens alone, so that all ranks of a replica make the same ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from rlite.backends.embedded.scheduler import RunningSequence

NGRAM = 3
"""tokens that must have occurred before"""
LONGEST = 12
"""tokens that one sequence is proposed at most, and tokens of a match that are compared"""
FAMILY = 16
"""texts whose first tokens are equal propose to each other: so many tokens of the prompt"""
CANDIDATES = 6
"""latest occurrences of an n-gram that are compared"""
TEXTS = 512
"""latest texts that propose"""
NGRAMS = 1 << 17
"""n-grams of a family. Beyond it they are forgotten, and later ones take their place"""
FIXED_ROWS = 8
"""rows of a decode step on CPU that take as long as all that does not depend on the number of rows"""
PROBE = 64
"""bursts without speculation after which it is tried again"""
SHORT_BURST = 4
"""decode steps between a check and the next search; each search that finds nothing doubles the distance to the next"""
FIRST_SHARE = 0.75
"""assumed share of accepted tokens before the first check"""
MEMORY = 0.9
"""weight of the share of accepted tokens before a check"""

Occurrence = tuple[list[int], int]
"""tokens of a text, and the index behind an n-gram"""


class _Text(NamedTuple):
    family: tuple[int, ...]
    tokens: list[int]
    """prompt and completion; the sequence appends to it"""


@dataclass
class _Family:
    occurrences: dict[tuple[int, ...], list[Occurrence]] = field(default_factory=dict)
    lengths: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    """each text with the number of its tokens that are indexed, by its identity"""
    prompts: set[bytes] = field(default_factory=set)

    def index(self) -> None:
        """Add the n-grams that were generated since the last call and have a next token."""
        for key, (tokens, done) in self.lengths.items():
            for end in range(done, len(tokens)):
                found = self.occurrences.setdefault(tuple(tokens[end - NGRAM : end]), [])
                found.append((tokens, end))
                if len(found) > CANDIDATES:
                    del found[0]
            self.lengths[key] = tokens, max(done, len(tokens))
        if len(self.occurrences) > NGRAMS:
            self.occurrences.clear()


class SuffixIndex:
    """The texts of running and ended sequences, by the beginning of their prompts. Texts are indexed when needed."""

    def __init__(self) -> None:
        self._texts: deque[_Text] = deque()
        self._families: dict[tuple[int, ...], _Family] = {}

    def add(self, sequence: RunningSequence) -> None:
        """Let a sequence propose. Tokens that are generated later are seen, and so are those of an ended sequence."""
        tokens, key = sequence.tokens, _family_of(sequence)
        family = self._families.setdefault(key, _Family())
        is_known = sequence.prompt_key in family.prompts  # the prompt was indexed with a sibling
        family.lengths[id(tokens)] = tokens, max(NGRAM, sequence.prompt_len if is_known else 0)
        family.prompts.add(sequence.prompt_key)
        self._texts.append(_Text(key, tokens))
        if len(self._texts) > TEXTS:
            self._forget(self._texts.popleft())

    def _forget(self, text: _Text) -> None:
        family = self._families[text.family]
        family.lengths.pop(id(text.tokens), None)
        if not family.lengths:
            del self._families[text.family]

    def find(self, sequence: RunningSequence, most: int) -> list[int]:
        """Return the tokens that are likely to follow, as many as the match is long."""
        tokens, family = sequence.tokens, self._families.get(_family_of(sequence))
        if family is None or most < 1:
            return []
        family.index()
        best, longest = None, 0
        for text, end in reversed(family.occurrences.get(tuple(tokens[-NGRAM:]), ())):
            if (length := _match(text, end, tokens)) > longest and end < len(text):
                best, longest = (text, end), length
        if best is None:
            return []
        text, end = best
        found = text[end : end + min(most, longest)]
        if text is tokens:  # a period goes on
            found += [found[i % len(found)] for i in range(min(most, longest) - len(found))]
        return found


def _family_of(sequence: RunningSequence) -> tuple[int, ...]:
    return tuple(sequence.request.input_ids[:FAMILY])


def _match(text: Sequence[int], end: int, tokens: Sequence[int]) -> int:
    """Return the number of equal tokens before `end` and at the end of `tokens`, at most LONGEST."""
    most, length = min(LONGEST, end, len(tokens)), NGRAM
    while length < most and text[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


class Speculator:
    """The proposals of one worker, and the decision whether a check is worth its time.

    A decode step takes as long as FIXED_ROWS + rows, in units of a row. A check of some proposals adds their number. So
    it pays if the share of accepted tokens is above rows / (rows + FIXED_ROWS): at a few rows nearly always, in a full
    batch only for texts that hardly vary.
    """

    def __init__(self, is_always: bool) -> None:
        self._is_always = is_always
        self.num_proposed = self.num_accepted = self.num_checks = 0
        self.restart([])

    def restart(self, sequences: Sequence[RunningSequence]) -> None:
        """Forget all texts but those of running sequences, so that decisions depend on what these weights served."""
        self._index, self._share, self._num_idle = SuffixIndex(), FIRST_SHARE, 0
        self.burst = SHORT_BURST
        """most decode steps before the next search"""
        for sequence in sequences:
            self.add(sequence)

    def add(self, sequence: RunningSequence) -> None:
        """Let a sequence propose."""
        self._index.add(sequence)

    def propose(self, sequences: Sequence[RunningSequence]) -> list[list[int]]:
        """Return the proposed tokens of each running sequence; [] if no check would pay."""
        if not self.is_worthwhile(len(sequences)):
            self._num_idle, self.burst = self._num_idle + 1, PROBE
            if self._num_idle < PROBE:
                return []
        proposals = [self._index.find(s, min(s.room - 1, LONGEST)) for s in sequences]
        has_found = any(proposals)
        self.burst = SHORT_BURST if has_found else min(2 * self.burst, PROBE)
        return proposals if has_found else []

    def is_worthwhile(self, num_rows: int) -> bool:
        """Return whether checks pay in a batch of so many rows."""
        return self._is_always or self._share > num_rows / (num_rows + FIXED_ROWS)

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Count the tokens of a check."""
        self._num_idle = 0
        self._share = MEMORY * self._share + (1 - MEMORY) * num_accepted / num_proposed
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
        self.num_checks += 1


def kept_spans(sampled: Sequence[int], proposals: Sequence[Sequence[int]]) -> list[slice]:
    """Return which sampled tokens each row keeps: up to the first one that was not proposed, this one included.

    `sampled`: tokens of all rows in order; each row has one more than it was proposed.
    """
    starts, spans = accumulate((len(p) + 1 for p in proposals), initial=0), []
    for start, proposal in zip(starts, proposals, strict=False):
        num = 0
        while num < len(proposal) and sampled[start + num] == proposal[num]:
            num += 1
        spans.append(slice(start, start + num + 1))
    return spans
