"""Raw texts to tokens: prompts, and answers with their end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlite.data.chat.ends import LearntEnds
from rlite.data.tokens import Tokens
from rlite.errors import ConfigError, DataError

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

    Args:
        tokenizer: the model's tokenizer.
        texts: the prompts.
        limit: as for `bounded_tokens`.

    Returns:
        The tokens of each prompt. Each begins, once, with the token that the tokenizer puts before every text (Llama's
        `<|begin_of_text|>`), if there is one.
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

    Args:
        tokenizer: the model's tokenizer.
        text: any text.
        limit: tokens that fit into the model's context; None does not bound the text.

    Raises:
        TooManyTokens: the text is far longer than `limit`. A text that is a little longer is tokenised.
    """
    if limit is not None and len(text) > (size := CHARACTERS_PER_TOKEN * max(limit, 1024)):
        count = 0
        for start in range(0, len(text), size):
            count += len(raw_tokens(tokenizer, [text[start : start + size]])[0])
            if count > 2 * max(limit, 1024):
                raise TooManyTokens(f"a text of {len(text)} characters has far more tokens than the {limit} that fit")
    return raw_tokens(tokenizer, [text])[0]


def answer_encoder(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, Any]],
    answers: Sequence[str],
    ends: LearntEnds | None = None,
) -> Callable[[range], list[list[Tokens]]]:
    """Return a function that tokenises a raw `prompt` with each of its answers.

    Prompt and answer are tokenised apart, as they are when an answer is generated. An answer ends with one
    end-of-sequence token. Only the answer is learnt.

    Args:
        tokenizer: the model's tokenizer.
        rows: the table.
        answers: columns with answers.
        ends: takes note of the end; None if nobody compares it.

    Returns:
        A function: row numbers -> for each row, one sequence for each answer.

    Raises:
        ConfigError: the tokenizer has no end-of-sequence token.
    """
    end = _end_of_sequence(tokenizer, ends)

    def joined(prompt: list[int], answer: list[int]) -> Tokens:
        ids = [*prompt, *answer] if answer[-1:] == [end] else [*prompt, *answer, end]
        return np.asarray(ids, dtype=np.int32), np.arange(len(ids)) >= len(prompt)

    def encode(numbers: range) -> list[list[Tokens]]:
        prompts = raw_prompts(tokenizer, [rows[number]["prompt"] for number in numbers])
        columns = [raw_tokens(tokenizer, [rows[number][name] for number in numbers]) for name in answers]
        return [[joined(prompt, answer) for answer in own] for prompt, *own in zip(prompts, *columns, strict=True)]

    return encode


def text_encoder(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]], ends: LearntEnds | None = None
) -> Callable[[range], list[list[Tokens]]]:
    """Return a function that tokenises the `text` of rows, with one end-of-sequence token. All tokens are learnt.

    Args:
        tokenizer: the model's tokenizer.
        rows: the table.
        ends: takes note of the end; None if nobody compares it.

    Returns:
        A function: row numbers -> for each row, one sequence.

    Raises:
        ConfigError: the tokenizer has no end-of-sequence token.
    """
    end = _end_of_sequence(tokenizer, ends)

    def ended(ids: list[int]) -> Tokens:
        ids = ids if ids[-1:] == [end] else [*ids, end]
        return np.asarray(ids, dtype=np.int32), np.ones(len(ids), dtype=bool)

    def encode(numbers: range) -> list[list[Tokens]]:
        return [[ended(ids)] for ids in raw_prompts(tokenizer, [rows[number]["text"] for number in numbers])]

    return encode


def _end_of_sequence(tokenizer: PreTrainedTokenizerBase, ends: LearntEnds | None) -> int:
    if tokenizer.eos_token_id is None:
        raise ConfigError("the model's tokenizer has no eos_token, which raw responses and texts end with")
    if ends is not None:
        ends.see(tokenizer.eos_token_id)
    return tokenizer.eos_token_id
