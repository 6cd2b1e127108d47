"""Raw texts to tokens: a prompt, and a response that ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlite.errors import ConfigError


class TextTokenizer(Protocol):
    """What raw texts need of a Hugging Face tokenizer."""

    @property
    def bos_token_id(self) -> Any: ...

    def __call__(self, text: Any, **options: Any) -> Any: ...


def raw_prompts(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Raw prompts as tokens, the same where a model learns from them and where it is asked with them.

    Each begins, once, with what the tokenizer puts before every text (Llama's `<|begin_of_text|>`).
    """
    bos = tokenizer.bos_token_id
    begin = [bos] if bos is not None and tokenizer("")["input_ids"][:1] == [bos] else []
    return [ids if begin and ids[:1] == begin else begin + ids for ids in raw_tokens(tokenizer, texts)]


def raw_tokens(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of texts that go on after others: nothing is put before or after them."""
    # `verbose` warns of texts longer than the model's context; what is too long is counted elsewhere.
    return tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


class RawEncoder:
    """Tokenises raw prompts and responses.

    They are tokenised apart and laid end to end, as they meet when a response is generated. A response ends with the
    end-of-sequence token.

    Raises:
        ConfigError: the tokenizer has no end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("the model's tokenizer has no eos_token, which raw responses end with")
        self._tokenizer = tokenizer
        self._end = tokenizer.eos_token_id

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of prompts (see `raw_prompts`)."""
        return raw_prompts(self._tokenizer, texts)

    def responses(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of responses, each with the end-of-sequence token, once."""
        return [ids if ids[-1:] == [self._end] else [*ids, self._end] for ids in raw_tokens(self._tokenizer, texts)]


def joined(prompt: Sequence[int], response: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(input_ids [L] int32, loss_mask [L] bool): a prompt, and a response that is learnt."""
    mask = np.zeros(len(prompt) + len(response), dtype=bool)
    mask[len(prompt) :] = True
    return np.asarray([*prompt, *response], dtype=np.int32), mask
