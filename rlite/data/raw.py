"""Raw texts to tokens: a prompt, and a response that ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlite.errors import ConfigError


class RawEncoder:
    """Tokenises raw prompts and responses.

    They are tokenised apart and laid end to end, as they meet when a response is generated. A prompt begins with what
    the tokenizer puts before every text (Llama's `<|begin_of_text|>`), a response ends with the end-of-sequence token.

    Raises:
        ConfigError: the tokenizer has no end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("the model's tokenizer has no eos_token, which raw responses end with")
        self._tokenizer = tokenizer
        self._end = tokenizer.eos_token_id
        begin = tokenizer.bos_token_id
        self._begin = [begin] if begin is not None and tokenizer("")["input_ids"][:1] == [begin] else []

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of prompts."""
        return [self._begin + ids for ids in self._ids(texts)]

    def responses(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of responses, each with the end-of-sequence token, once."""
        return [ids if ids[-1:] == [self._end] else [*ids, self._end] for ids in self._ids(texts)]

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        # `verbose` warns of texts longer than the model's context; what is too long is counted elsewhere.
        encoded = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return encoded["input_ids"]


def joined(prompt: Sequence[int], response: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(input_ids [L] int32, loss_mask [L] bool): a prompt, and a response that is learnt."""
    mask = np.zeros(len(prompt) + len(response), dtype=bool)
    mask[len(prompt) :] = True
    return np.asarray([*prompt, *response], dtype=np.int32), mask
