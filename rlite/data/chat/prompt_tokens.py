"""The tokens of a prompt, and the end of an answer: what training and generation must do alike for one text."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from rlite.errors import DataError
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


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens, the end token among them."""
    return frozenset(getattr(tokenizer, "all_special_ids", ()))


def end_of(output: Sequence[int], stop_reason: StopReason, end_ids: Collection[int]) -> list[int]:
    """Return the end token with which a model has ended an answer, in a list; an empty list if it wrote none.

    Args:
        output: the tokens of the answer.
        stop_reason: why the answer ended.
        end_ids: tokens that end an answer.
    """
    return [token for token in output[-1:] if stop_reason == "stop" and token in end_ids]


BREAK = f"\U000f1ce5{secrets.randbits(64)}\U000f1ce6"
"""stands within the name of a special token that is plain text; random, so that no text holds it"""


def plain_text(text: str) -> str:
    """Return a rendered text as a person reads it, without BREAK."""
    return text.replace(BREAK, "")
