"""Text of tokens as they arrive. Text that can still change is held back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlite.data.chat.stops import split_at_stop
from rlite.data.chat.template import Tokenizer
from rlite.data.prompts import end_of
from rlite.rollout.tools.formats import ToolCall, ToolCallFormat, num_before, typed
from rlite.types import StopReason

MAX_PARTS = 3
"""tokens that may be the beginning of one character"""


class DecodedText:
    """Text of tokens as they arrive, without half a character at its end."""

    def __init__(self, tokenizer: Tokenizer, skips: bool) -> None:
        self._tokenizer = tokenizer
        self.skips = skips
        self.tokens: list[int] = []
        # Tokens are decoded together with those since `_start`, because decoders look at what stands before.
        self._start = self._read = 0
        self.text = ""

    def feed(self, tokens: Sequence[int], is_last: bool) -> None:
        """Append the text of further tokens."""
        self.tokens += tokens
        known = self._decode(self._start, self._read)
        end = len(self.tokens)
        whole = self._decode(self._start, end)
        if whole.endswith("\ufffd") and not is_last:
            end = max(end - MAX_PARTS, self._read)  # bytes before them are half a character for ever
            whole = self._decode(self._start, end)
        if len(whole) > len(known):
            self.text += whole[len(known) :]
            self._start, self._read = self._read, end

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self.tokens[start:end], skip_special_tokens=self.skips)


@dataclass(eq=False)
class TextStream:
    """Text of one output. It holds back half a character, and a possible beginning of a stop string or a call."""

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    """the text ends before the first of them. They may be special tokens"""
    form: ToolCallFormat | None = None
    """format of calls of tools; None looks for none"""
    tools: Sequence[Mapping[str, Any]] | None = None
    """schemas, by which arguments that are written as text get their types"""
    end_ids: Collection[int] = ()
    """tokens that end an output; the last one is not part of the text"""
    prompt: str = ""
    """text of the prompt, which may have begun a thought"""
    text: str = field(default="", init=False)
    """all of it so far, up to a stop string"""
    stop_text: str = field(default="", init=False)
    """text from the stop string on that has ended the output; "" if something else has"""

    def __post_init__(self) -> None:
        self._tokens: list[int] = []
        self._said = DecodedText(self.tokenizer, skips=self.form is None or not self.form.shows_special_tokens)
        self._whole = DecodedText(self.tokenizer, skips=False)  # stop strings are searched in it
        self._sent = 0
        self._has_stopped = False

    def feed(self, tokens: Sequence[int], reason: StopReason | None = None) -> str:
        """Return the text that is settled by further tokens.

        `reason`: why the output ends with these tokens; None if it does not.
        """
        self._tokens += tokens
        end = end_of(self._tokens, reason or "stop", self.end_ids)  # without a reason, the last token may be the end
        said = self._tokens[len(self._said.tokens) : len(self._tokens) - len(end)]
        self._said.feed(said, reason is not None)
        self.text = self._said.text
        num_settled = len(self.text)
        if self.stops:
            num_settled -= self._held_back(tokens, reason is not None)
        if reason is not None and self.stops:
            text, rest = split_at_stop(self.tokenizer, self._tokens, self.stops, len(end), self._said.skips)
            self.text, num_settled = (text, len(text)) if rest else (self.text, num_settled)
            self.stop_text = rest.removesuffix(self.tokenizer.decode(end, skip_special_tokens=False))
        if self.form is not None:
            num_settled = min(num_settled, self.form.num_settled_after(self.prompt, self.text))
        return self._send(self.text[: max(num_settled, 0)])

    async def finish(self) -> tuple[str, list[ToolCall], str]:
        """Return the content, the calls, and the content that was not returned before, after the last token."""
        content, calls = self.text, list[ToolCall]()
        if self.form is not None:
            content, calls, _ = await self.form.read(self.text, self.prompt)
        return content, typed(calls, self.tools), self._send(content)

    def _held_back(self, tokens: Sequence[int], is_last: bool) -> int:
        """Return the number of characters at the end of the text that may belong to a stop string."""
        start = max(len(self._whole.text) - max(map(len, self.stops)), 0)
        self._whole.feed(tokens, is_last)
        tail = self._whole.text[start:]
        self._has_stopped = self._has_stopped or any(stop in tail for stop in self.stops)
        return len(self.text) if self._has_stopped else len(tail) - num_before(tail, self.stops)

    def _send(self, text: str) -> str:
        settled, self._sent = text[self._sent :], max(self._sent, len(text))
        return settled
