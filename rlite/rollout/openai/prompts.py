"""Prompts in tokens: those of an earlier turn as they were, and only what is new from its text.

A chat template renders a whole conversation. Where a request goes on from an answer as it was returned, and the
template renders everything up to that answer as the model has read and written it, the prompt is the recorded tokens
and those of the rest. Where the template writes history anew (it drops earlier thoughts, say), everything is tokenised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from rlite.data.chat import STAND_IN
from rlite.data.raw import bounded_tokens, raw_prompts
from rlite.errors import DataError
from rlite.rollout.chat.template import Message, TemplateRefusal, render
from rlite.rollout.openai.recording import Turn
from rlite.rollout.workflow import Tokenizer


class Prompt(NamedTuple):
    """What the model is asked with."""

    token_ids: list[int]
    text: str
    parent: Turn | None


class _Ending(NamedTuple):
    """What a template writes after an answer."""

    closing: str
    """wherever the answer stands"""
    tail: str
    """where nothing follows: there are templates that end a conversation with a token of its own"""


class ChatPrompts:
    """Renders and tokenises prompts for one tokenizer.

    Args:
        tokenizer: with a chat template, if there are conversations.
        chat_template_options: further keyword arguments for `apply_chat_template`.
        limit: tokens that fit into the model's context; None does not bound texts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template_options: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._limit = limit
        self._options = dict(chat_template_options or {})

    def chat(self, messages: Sequence[Message], tools: Any, turns: Sequence[Turn]) -> Prompt:
        """The prompt for the answer to `messages`, continuing one of `turns` if it does.

        Raises: DataError if the template refuses the conversation, or leaves out its tools or calls; TooManyTokens.
        """
        text = self._render(messages, tools, add_generation_prompt=True)
        _check_text(text, "messages")
        self._check_shown(messages, tools, text)
        for turn in _continued(messages, tools, turns):
            rest = self._rest(turn, messages, text)
            tokens = None if rest is None else self._tokens_after(turn, rest)
            if tokens is not None:
                return Prompt(turn.sequence + tokens, text, turn)
        return Prompt(bounded_tokens(self.tokenizer, text, self._limit), text, None)

    def text(self, prompt: str | list[int], turns: Sequence[Turn]) -> Prompt:
        """A prompt without a template. It continues a turn whose text, or tokens, it begins with."""
        raw = [turn for turn in reversed(turns) if turn.messages is None and not turn.is_aborted]
        if isinstance(prompt, str):
            _check_text(prompt, "prompt")
            for turn in sorted(raw, key=lambda turn: -len(turn.prompt_text + turn.text)):
                said = turn.prompt_text + turn.text
                if turn.prompt_text and len(prompt) > len(said) and prompt.startswith(said):
                    rest = bounded_tokens(self.tokenizer, prompt[len(said) :], self._limit)
                    return Prompt(turn.sequence + rest, prompt, turn)
            return Prompt(raw_prompts(self.tokenizer, [prompt], self._limit)[0], prompt, None)
        for turn in sorted(raw, key=lambda turn: -len(turn.sequence)):
            if prompt[: len(turn.sequence)] == turn.sequence:
                return Prompt(prompt, "", turn)
        return Prompt(prompt, "", None)

    def _rest(self, turn: Turn, messages: Sequence[Message], text: str) -> str | None:
        """What follows the answer of `turn` in the rendered `text`, from the end of what the model says; None if the
        text before it is not what the model has read and written, white space apart."""
        if self._ending is None:
            return None
        end = _end_of(turn.prompt_text + turn.text + self._ending.closing, text)
        if end is not None:
            return self._ending.closing.rstrip() + text[end:]
        return self._rest_after_calls(turn, messages, text, self._ending)

    def _rest_after_calls(self, turn: Turn, messages: Sequence[Message], text: str, ending: _Ending) -> str | None:
        """The same for an answer with calls, which a template may write in other words than the model."""
        assert turn.messages is not None
        assert turn.answer is not None
        calls = turn.answer.get("tool_calls", ())
        before = self._render(messages[: len(turn.messages) + 1], turn.tools, add_generation_prompt=False)
        before = before.removesuffix(ending.tail)
        if not calls or not before.endswith(ending.closing) or not text.startswith(before):
            return None
        end = _end_of(turn.prompt_text + turn.answer["content"], before)
        if end is None or not all(call["function"]["name"] in before[end:] for call in calls):
            return None
        return ending.closing + text[len(before) :]

    def _tokens_after(self, turn: Turn, text: str) -> list[int] | None:
        """The tokens of `text`, without the end token that it begins with if the model has written that itself; None if
        the model has ended its turn with another one than the template."""
        tokens = bounded_tokens(self.tokenizer, text, self._limit)
        last = turn.output_ids[-1:]
        if turn.finish_reason != "stop" or self.tokenizer.decode(last, skip_special_tokens=True):
            return tokens
        return tokens[1:] if tokens[:1] == last else None

    @cached_property
    def _ending(self) -> _Ending | None:
        """What the template puts after an answer; None if it cannot be told."""
        question = {"role": "user", "content": "question"}
        exchange = [question, {"role": "assistant", "content": STAND_IN}]
        try:
            last = self._render(exchange, None, add_generation_prompt=False).split(STAND_IN)
            inner = self._render([*exchange, question], None, add_generation_prompt=True).split(STAND_IN)
        except DataError:
            return None
        if len(last) != 2 or len(inner) != 2:
            return None
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(last[1], inner[1], strict=False))
        size = sum(1 for _ in shared)
        return _Ending(last[1][:size], last[1][size:])

    def _check_shown(self, messages: Sequence[Message], tools: Any, text: str) -> None:
        for number, message in enumerate(messages):
            for call in message.get("tool_calls", ()):
                if call["function"]["name"] not in text:
                    raise DataError(f"messages[{number}]: the model's chat template leaves out calls of tools")
        for tool in tools or ():
            if tool["function"]["name"] not in text:
                raise DataError(f"tools: the model's chat template leaves out {tool['function']['name']!r}")

    def _render(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool) -> str:
        options = {**self._options, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return render(self.tokenizer, messages, options)
        except TemplateRefusal as error:
            raise DataError(f"messages: {error}") from error


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what}: half of a surrogate pair, {error.object[error.start]!r}, is no text") from error


def _continued(messages: Sequence[Message], tools: Any, turns: Sequence[Turn]) -> list[Turn]:
    """The turns whose conversation, with the answer as it was returned, `messages` begins with; the longest first."""

    def is_continued(turn: Turn) -> bool:
        if turn.messages is None or turn.answer is None or turn.is_aborted or turn.tools != tools:
            return False
        count = len(turn.messages)
        if count >= len(messages) or not _is_same(messages[count], turn.answer):
            return False
        return list(messages[:count]) == [*turn.messages]

    found = [turn for turn in reversed(turns) if is_continued(turn)]
    return sorted(found, key=lambda turn: -len(turn.messages or ()))


def _is_same(message: Message, answer: Message) -> bool:
    """White space apart: frameworks strip what they get, and take thoughts out to put them back another way."""
    if message["content"] != answer["content"] and message["content"].split() != answer["content"].split():
        return False
    return {**message, "content": None} == {**answer, "content": None}


def _end_of(beginning: str, text: str) -> int | None:
    """Where `beginning` ends in `text`, if that begins with it, white space apart."""
    expected, matched = "".join(beginning.split()), 0
    for piece in re.finditer(r"\S+", text):
        size = min(len(piece[0]), len(expected) - matched)
        if piece[0][:size] != expected[matched : matched + size]:
            return None
        matched += size
        if matched == len(expected):
            return piece.start() + size
    return None
