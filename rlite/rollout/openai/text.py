"""Text of tokens as they arrive. Text that can still change is held back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlite.rollout.tools.formats import ToolCall, ToolCallFormat, num_before, typed
from rlite.rollout.workflow import Tokenizer


class TextStream:
    """Text of one output. It holds back half a character, and a possible beginning of a stop string or a call.

    Args:
        tokenizer: the model's tokenizer.
        stops: the text ends before the first of them.
        form: how calls of tools are written; None looks for none.
        tools: schemas, by which arguments that are written as text get their types.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        form: ToolCallFormat | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._reach = max(map(len, stops), default=0)
        self._form = form
        self._tools = tools
        self._skips = form is None or not form.shows_special_tokens
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._tokens: list[int] = []
        # Tokens are decoded together with those since `_start`, because decoders look at what stands before.
        self._start = self._read = 0
        self._sent = 0
        self._has_stopped = False
        self.text = ""
        """all of it so far, up to a stop string"""

    def feed(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """Return the text that is settled by further tokens."""
        if is_last and not self._skips and tokens and tokens[-1] in self._special:
            tokens = tokens[:-1]  # the end of the turn is not said
        self._tokens += tokens
        known = self._decode(self._start, self._read)
        whole = self._decode(self._start, len(self._tokens))
        if len(whole) > len(known) and (is_last or not whole.endswith("\ufffd")):
            self._append(whole[len(known) :])
            self._start, self._read = self._read, len(self._tokens)
        end = len(self.text)
        if not self._has_stopped:
            tail = self.text[max(end - self._reach, 0) :]
            end += num_before(tail, self._stops) - len(tail)
        if self._form is not None:
            end = min(end, self._form.num_settled(self.text))
        return self._send(self.text[:end])

    def finish(self) -> tuple[str, list[ToolCall], str]:
        """Return the content, the calls, and the content that was not returned before, after the last token."""
        content, calls = (self.text, []) if self._form is None else self._form.parse(self.text)
        return content, typed(calls, self._tools), self._send(content)

    def _send(self, text: str) -> str:
        settled, self._sent = text[self._sent :], max(self._sent, len(text))
        return settled

    def _append(self, text: str) -> None:
        if self._has_stopped:
            return
        start = max(len(self.text) - self._reach, 0)
        self.text += text
        found = [at for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text, self._has_stopped = self.text[: min(found)], True

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=self._skips)
