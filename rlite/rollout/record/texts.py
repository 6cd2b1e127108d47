"""Text of token sequences, with the place of each token in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

WIDEST = 4
"""tokens that one character takes at most"""


class TokenTexts:
    """Decodes sequences, special tokens included.

    Args:
        tokenizer: the model's tokenizer, for this object alone: no other thread may use it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer if isinstance(tokenizer, PreTrainedTokenizerFast) else None
        self._pieces: dict[int, str] = {}

    def decode(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of a sequence, and the place at which each token begins, in characters.

        Tokens that are parts of one character begin at the same place.
        """
        pieces = [self._piece(token) for token in ids]
        if "".join(pieces) != self._decode(ids):  # text that depends on neighbours, such as parts of a character
            pieces = self._in_context(ids)
        offsets, end = [], 0
        for piece in pieces:
            offsets.append(end)
            end += len(piece)
        return "".join(pieces), offsets

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._decode([token])
        return self._pieces[token]

    def _in_context(self, ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds to the text before it."""
        pieces: list[str] = []
        start = read = 0
        known = ""
        for end in range(1, len(ids) + 1):
            text = self._decode(ids[start:end])
            is_whole = not text.endswith("\ufffd")
            is_settled = is_whole or end - read == WIDEST or end == len(ids)
            pieces.append(text[len(known) :] if is_settled else "")
            if is_settled:
                # bytes that are no character, taken once more with what follows, would make another text
                start, read = (read if is_whole else end), end
                known = self._piece(ids[start]) if read - start == 1 else self._decode(ids[start:read])
        return pieces

    def _decode(self, ids: Sequence[int]) -> str:
        if self._backend is not None:  # the same, without the cost of its checks
            return self._backend.decode(ids, skip_special_tokens=False)
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
