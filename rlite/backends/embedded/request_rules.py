"""Rules for requests: validation, stop tokens and stop strings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from rlite.backends.embedded.memory_plan import CONTEXT_LIMIT
from rlite.backends.embedded.options import EmbeddedOptions
from rlite.backends.embedded.scheduler import RunningSequence
from rlite.data.chat.answers import length_at_stop
from rlite.errors import RliteError
from rlite.nn.pretrained import load_tokenizer
from rlite.types import GenerationHyperparameters, SequenceRequest


@dataclass
class RequestRules:
    """Rules by which one worker serves requests. They are equal on all ranks of a replica."""

    path: str
    """folder of the checkpoint, for its tokenizer"""
    options: EmbeddedOptions
    vocab_size: int
    max_model_len: int
    """longest sequence, in tokens"""
    end_ids: frozenset[int]
    """the model's own end tokens"""
    agreed: Callable[[list[bool]], list[bool]]
    """returns for each flag whether it is set on all ranks"""

    def sequence(self, request: SequenceRequest) -> RunningSequence:
        """Return the sequence that the scheduler runs for a request."""
        gconfig, num_prompt = request.gconfig, len(request.input_ids)
        tokens = [*request.input_ids, *request.output_ids]
        return RunningSequence(
            request=request,
            tokens=tokens,
            num_reported=len(tokens),
            max_tokens=min(num_prompt + gconfig.max_new_tokens, self.max_model_len),
            min_tokens=num_prompt + gconfig.min_new_tokens,
            stop_ids=self.stop_ids(gconfig),
        )

    def stop_ids(self, gconfig: GenerationHyperparameters) -> frozenset[int]:
        """Return the tokens that end a completion."""
        return frozenset(gconfig.stop_token_ids) | (frozenset() if gconfig.ignore_eos else self.end_ids)

    def objection(self, request: SequenceRequest) -> str | None:
        """Return the reason why a request cannot be served, None if it can."""
        ids = [*request.input_ids, *request.output_ids]
        if not request.input_ids:
            return "the prompt is empty; give at least one token"
        if (error := self.length_objection(len(ids))) is not None:
            return error
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            return f"token id {wrong} is not in the vocabulary of {self.vocab_size}"
        if request.gconfig.min_new_tokens and self.stop_ids(request.gconfig).issuperset(range(self.vocab_size)):
            return f"min_new_tokens={request.gconfig.min_new_tokens}, and every token is a stop token: none may be made"
        if request.gconfig.stop and isinstance(self._tokenizer, str):
            return f"stop strings need a tokenizer; {self.path} has none ({self._tokenizer}). Use stop_token_ids"
        return None

    def length_objection(self, num_tokens: int) -> str | None:
        """Return the reason why a prompt of so many tokens is too long, None if it is not."""
        if num_tokens <= (room := self.max_model_len - 1):
            return None
        limit = "" if self.options.max_model_len else f" (the default: the model's limit, at most {CONTEXT_LIMIT})"
        return f"the prompt has {num_tokens} tokens, max_model_len={self.max_model_len}{limit} leaves room for {room}"

    def find_stop(self, sequence: RunningSequence, start: int) -> int | None:
        """Return the length in tokens at which a completion first contains a stop string, None if it contains none.

        Tokens before index `start` were checked earlier.
        """
        assert not isinstance(self._tokenizer, str)  # else it was refused
        stops = sequence.request.gconfig.stop
        return length_at_stop(self._tokenizer, sequence.tokens, stops, start, sequence.prompt_len)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase | str:
        """The tokenizer, or the reason why there is none.

        All ranks agree: they have one only if every rank could read it.
        """
        tokenizer: PreTrainedTokenizerBase | str
        try:
            tokenizer = load_tokenizer(self.path)
        except RliteError as error:  # only stop strings cannot do without
            tokenizer = str(error)
        (is_everywhere,) = self.agreed([not isinstance(tokenizer, str)])
        return tokenizer if is_everywhere or isinstance(tokenizer, str) else "another rank could not read it"
