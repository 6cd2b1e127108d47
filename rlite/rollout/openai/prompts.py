"""Prompts as tokens: the tokens of an earlier turn unchanged, and the tokens of the text that is new.

A chat template renders a whole conversation. Suppose a request continues an answer as it was returned, and the template
renders everything up to that answer as the model has read and written it. Then the prompt is the recorded tokens and
the tokens of the rest. If the template rewrites history (it drops earlier thoughts, say), the whole text is tokenised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlite.data.chat.raw import bounded_tokens, raw_prompts
from rlite.data.chat.template import OPTIONAL, ChatTemplate, Message, Tokenizer
from rlite.data.chat.turns import text_after, tokens_after
from rlite.errors import DataError
from rlite.rollout.openai.recording import Turn
from rlite.rollout.openai.requests import ModelRequest


class Prompt(NamedTuple):
    """Input of one generation."""

    token_ids: list[int]
    text: str
    parent: Turn | None
    """the turn that the prompt continues"""


class ChatPrompts:
    """Renders and tokenises prompts for one tokenizer.

    Args:
        tokenizer: the model's tokenizer, with a chat template if there are conversations.
        chat_template_options: further keyword arguments for `apply_chat_template`.
        limit: tokens that fit into the model's context; None does not bound texts.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_template_options: Mapping[str, Any] | None = None, limit: int | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._limit = limit
        self._template = ChatTemplate(tokenizer, chat_template_options)

    def of(self, request: ModelRequest, turns: Sequence[Turn]) -> list[Prompt]:
        """Return the prompts of a request. A conversation is one prompt. Errors are those of `chat`."""
        if request.messages is not None:
            return [self.chat(request.messages, request.tools, turns)]
        # an echoed text is scored with the tokens of the text, not with the tokens that an earlier turn sampled, and
        # prompts of a list are not searched for earlier turns: that would take prompts times turns
        is_continuing = len(request.prompts) == 1 and not request.is_echo
        return [self.text(prompt, turns if is_continuing else ()) for prompt in request.prompts]

    def chat(self, messages: Sequence[Message], tools: Any, turns: Sequence[Turn]) -> Prompt:
        """Return the prompt for the answer to a conversation.

        Args:
            messages: the conversation.
            tools: JSON schemas, or None.
            turns: the recorded turns. The prompt continues the longest one that the conversation begins with.

        Raises:
            TemplateRefusal: the chat template does not render the conversation.
            DataError: the chat template leaves out a tool or a part of a message, or the text is not valid Unicode.
            TooManyTokens: the text is far longer than the limit.
        """
        text = self._template.render(messages, tools=tools, add_generation_prompt=True)
        _check_text(text, "messages")
        optional = (
            *OPTIONAL,
            "'content'",
        )  # a client may send any history, and the model reads what the template shows
        self._template.check(messages, text, optional=optional, tools=tools, add_generation_prompt=True)
        for turn in _continued(messages, tools, turns):
            if (rest := text_after(self._template, turn, messages, text)) is None:
                continue
            tokens, has_same_end = self._after(turn, rest)
            if has_same_end:
                return Prompt(turn.sequence + tokens, text, turn)
        return Prompt(bounded_tokens(self.tokenizer, text, self._limit), text, None)

    def text(self, prompt: str | list[int], turns: Sequence[Turn]) -> Prompt:
        """Return a prompt without a template. It continues a turn if it begins with its text or its tokens."""
        raw = [turn for turn in reversed(turns) if turn.messages is None and not turn.is_aborted]
        if isinstance(prompt, str):
            _check_text(prompt, "prompt")
            begun = [turn for turn in raw if _begins_with(prompt, turn)]
            if longest := max(begun, key=lambda turn: len(turn.prompt_text) + len(turn.text), default=None):
                said = len(longest.prompt_text) + len(longest.text)
                rest, _ = self._after(longest, prompt[said:])
                return Prompt(longest.sequence + rest, prompt, longest)
            return Prompt(raw_prompts(self.tokenizer, [prompt], self._limit)[0], prompt, None)
        begun = [turn for turn in raw if prompt[: len(turn.prompt_ids)] == turn.prompt_ids]
        begun = [turn for turn in begun if prompt[: len(turn.sequence)] == turn.sequence]
        return Prompt(prompt, "", max(begun, key=lambda turn: len(turn.sequence), default=None))

    def _after(self, turn: Turn, rest: str) -> tuple[list[int], bool]:
        """Return the tokens of text after an answer that the model has not written, and whether both end it alike."""
        rest = rest.removeprefix(turn.stop_text)  # the answer as it was returned lacks it, and its tokens have it
        has_end = turn.messages is not None and not turn.stop_text
        said, reason = turn.output_ids, turn.finish_reason
        return tokens_after(self.tokenizer, rest, said, reason, self._limit, turn.end_ids, has_end)


def _begins_with(prompt: str, turn: Turn) -> bool:
    """Return whether a prompt is a turn's text, with the stop string that ended it, and more."""
    start = len(turn.prompt_text)
    said = turn.text + turn.stop_text
    if not turn.prompt_text or len(prompt) <= start + len(said):
        return False
    return prompt.startswith(turn.prompt_text) and prompt.startswith(said, start)


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what}: half of a surrogate pair, {error.object[error.start]!r}, is no text") from error


def _continued(messages: Sequence[Message], tools: Any, turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns whose conversation and answer `messages` begins with, the longest first."""

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
    """Return whether two messages are equal, except for white space: frameworks strip it or move it."""
    if message["content"] != answer["content"] and message["content"].split() != answer["content"].split():
        return False
    return {**message, "content": None} == {**answer, "content": None}
