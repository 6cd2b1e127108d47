"""Requests as every inference backend sees them: what ends them, why they are refused, and how they are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from rlite.data.chat.answers import length_at_stop
from rlite.errors import RliteError
from rlite.nn.pretrained import load_tokenizer
from rlite.types import GenerationHyperparameters, SequenceRequest


class Sampling(NamedTuple):
    """Parameters by which the next token of one request is sampled."""

    gconfig: GenerationHyperparameters
    seed: int
    stop_ids: frozenset[int] = frozenset()
    """tokens that end the request"""
    is_early: bool = False
    """stop tokens may not be generated yet"""
    has_kept_ids: bool = False
    """the request asks for kept ids"""

    @property
    def banned_ids(self) -> frozenset[int]:
        """Tokens that may not be generated yet."""
        return self.stop_ids if self.is_early else frozenset()


def num_left(request: SequenceRequest, max_model_len: int) -> int:
    """Return the number of tokens that a request may still generate."""
    num_done = len(request.output_ids)
    return min(request.gconfig.max_new_tokens - num_done, max_model_len - len(request.input_ids) - num_done)


def objection(request: SequenceRequest, max_model_len: int, vocab_size: int, default: str = "") -> str | None:
    """Return the reason why no backend can serve a request, None if one can.

    Args:
        request: the request.
        max_model_len: longest sequence in tokens.
        vocab_size: number of tokens in the model's vocabulary.
        default: explains `max_model_len` if it is not the user's.
    """
    ids = [*request.input_ids, *request.output_ids]
    if not request.input_ids:
        return "the prompt is empty; give at least one token"
    if (error := length_objection(len(ids), max_model_len, default)) is not None:
        return error
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        return f"token id {wrong} is not in the vocabulary of {vocab_size}"
    return None


def length_objection(num_tokens: int, max_model_len: int, default: str = "") -> str | None:
    """Return the reason why a prompt is too long, None if it is not.

    Args:
        num_tokens: length of the prompt.
        max_model_len: longest sequence in tokens.
        default: explains `max_model_len` if it is not the user's.
    """
    if num_tokens < max_model_len:
        return None
    limit = f"max_model_len={max_model_len}{default}"
    return f"the prompt has {num_tokens} tokens, {limit} leaves room for {max_model_len - 1}"


@dataclass
class RequestRules:
    """Rules of a backend that searches for stop tokens and stop strings itself."""

    path: str
    """folder of the checkpoint, for its tokenizer"""
    vocab_size: int
    max_model_len: int
    """longest sequence, in tokens"""
    end_ids: frozenset[int]
    """the model's own end tokens"""
    default: str = ""
    """explains `max_model_len` if it is not the user's"""
    agreed: Callable[[list[bool]], list[bool]] = list
    """returns for each flag whether it is set on all ranks"""

    def stop_ids(self, gconfig: GenerationHyperparameters) -> frozenset[int]:
        """Return the tokens that end a completion."""
        return frozenset(gconfig.stop_token_ids).union(() if gconfig.ignore_eos else self.end_ids)

    def objection(self, request: SequenceRequest) -> str | None:
        """Return the reason why a request cannot be served, None if it can."""
        gconfig = request.gconfig
        if (error := objection(request, self.max_model_len, self.vocab_size, self.default)) is not None:
            return error
        if gconfig.min_new_tokens and self.stop_ids(gconfig).issuperset(range(self.vocab_size)):
            return f"min_new_tokens={gconfig.min_new_tokens}, and every token is a stop token: none may be made"
        if gconfig.stop and isinstance(self._tokenizer, str):
            return f"stop strings need a tokenizer; {self.path} has none ({self._tokenizer}). Use stop_token_ids"
        return None

    def length_at_stop(self, request: SequenceRequest, tokens: Sequence[int], start: int, begin: int = 0) -> int | None:
        """Return the length in tokens at which a completion first contains a stop string, None if it contains none.

        Args:
            request: the request.
            tokens: its tokens.
            start: index of the first token that is new since the last search.
            begin: index of the first token of the completion.
        """
        return length_at_stop(self._tokenizer, tokens, request.gconfig.stop, start, begin)

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer, or the reason why there is none. All ranks have one only if every rank could read it."""
        tokenizer: Any
        try:
            tokenizer = load_tokenizer(self.path)
        except RliteError as error:  # only stop strings cannot do without
            tokenizer = str(error)
        (is_everywhere,) = self.agreed([not isinstance(tokenizer, str)])
        return tokenizer if is_everywhere or isinstance(tokenizer, str) else "another rank could not read it"
