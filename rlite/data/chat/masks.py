"""Convert conversations to tokens, and mark the tokens of the assistant.

The tokens are those of `apply_chat_template(messages, tokenize=True)`: a conversation is rendered and tokenised whole,
and the tokenizer's offsets map characters to tokens. Turns are never tokenised one by one, because that would give
other tokens at their seams. They are never rendered one by one, because templates rewrite history (Qwen3 drops earlier
thoughts).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlite.data.chat.forms import check_parts
from rlite.data.chat.special_tokens import EscapingTokenizer
from rlite.data.chat.template import QUESTION, ChatTemplate, TemplateRefusal, check_calls, num_shared
from rlite.data.tables import check_text
from rlite.errors import ConfigError, DataError

Messages = Sequence[Mapping[str, Any]]

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BASIC_ROLES = ("user", "assistant")


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as tokens. `turns` has the tokens [start, end) of each turn of the assistant."""

    input_ids: np.ndarray
    """[L] int32"""
    turns: tuple[tuple[int, int], ...]

    def mask(self, turns: slice = slice(None)) -> np.ndarray:
        """Return [L] bool: true at the tokens of the given turns of the assistant (default: of all turns)."""
        mask = np.zeros(len(self.input_ids), dtype=bool)
        for start, end in self.turns[turns]:
            mask[start:end] = True
        return mask


def check_messages(messages: Any, where: str, key: str = "messages") -> None:
    """Check that a value is a list of messages, {"role": text, "content": text, ...}.

    The content may also be a list of parts. It may be missing if the message has `tool_calls`.

    Args:
        messages: the value to check.
        where: names the conversation in errors, such as "data.path=x.json, row 3".
        key: the name of the value in errors.

    Raises:
        DataError: the value has another form. The error names the message and the key.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        found = "an empty list" if isinstance(messages, (list, tuple)) else type(messages).__name__
        raise DataError(f"{where}: {key!r} is {found}; expected a list of {{'role': ..., 'content': ...}}")
    for number, message in enumerate(messages):
        at = f"{where}, {key}[{number}]"
        if not isinstance(message, Mapping):
            raise DataError(f"{at}: expected {{'role': ..., 'content': ...}}, found {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise DataError(f"{at}: 'role' is {message.get('role')!r}; expected a text such as 'user'")
        content = message.get("content")
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise DataError(f"{at}: 'content' is {content!r}; expected a text")
        if isinstance(content, str):
            check_text(content, f"{at}: 'content'")
        elif content is not None:
            check_parts(content, at)


class ChatEncoder:
    """Tokenises conversations with one tokenizer and marks the tokens of the assistant.

    A turn of the assistant is everything after the generation prompt: thoughts, content and calls of tools as the
    template renders them, and the token that ends the turn. The `{% generation %}` marks of the template show the turns
    if there are any. Otherwise the conversation is rendered again with a stand-in for the content of one turn; the text
    before and after the stand-in belongs to the template. Nothing is guessed: a template whose turns cannot be found in
    this way is an error.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        escape_special_tokens: make special tokens in messages plain text, except in the assistant's messages. See
            `EscapingTokenizer`.
        options: keyword arguments for `apply_chat_template`, such as `enable_thinking=False`.

    Raises:
        ConfigError: the tokenizer has no chat template or is not fast, or the turns of its template cannot be found.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, escape_special_tokens: bool = False, **options: Any) -> None:
        if not tokenizer.is_fast:
            raise ConfigError(f"{type(tokenizer).__name__} gives no offsets; messages need a fast tokenizer")
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise ConfigError(
                "the model's tokenizer has no chat template, which 'messages' need; give raw texts, or set "
                "tokenizer.chat_template and save the tokenizer"
            ) from error
        self._is_marked = bool(_GENERATION_MARK.search(template)) and not escape_special_tokens
        self._template = ChatTemplate(EscapingTokenizer(tokenizer) if escape_special_tokens else tokenizer, options)
        if not self._is_marked:
            self._learn_turns()

    def encode(self, chats: Sequence[Messages], where: Sequence[str], tools: Sequence[Any] = ()) -> list[EncodedChat]:
        """Tokenise conversations.

        Args:
            chats: one list of messages for each conversation.
            where: one name for each conversation, used in errors, such as "data.path=x.json, row 3".
            tools: the tools of each conversation, JSON schemas or None; empty if no conversation has tools.

        Returns:
            One encoded conversation for each conversation.

        Raises:
            DataError: a conversation is malformed, the template refuses or leaves out one of its roles, or its turns
                cannot be found. The error names the conversation and the role.
        """
        tools = tools or [None] * len(chats)
        chats = [self._fitted(*chat) for chat in zip(chats, where, tools, strict=True)]
        if self._is_marked:
            return [self._encode_marked(*chat) for chat in zip(chats, where, tools, strict=True)]
        rendered = [self._render(*chat) for chat in zip(chats, where, tools, strict=True)]
        # `verbose` warns of texts longer than the model's context; what is too long is counted elsewhere.
        encoded = self._template.tokenizer(
            [text for text, _ in rendered],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        return [
            EncodedChat(np.asarray(ids, dtype=np.int32), _tokens_of(turns, offsets))
            for (_, turns), ids, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]

    def _fitted(self, messages: Messages, where: str, tools: Any) -> Messages:
        check_messages(messages, where)
        return self._template.fitted(messages, f"{where}, ", tools)

    def _render(self, messages: Messages, where: str, tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation as text, with the characters [start, end) of each turn of the assistant.

        Raises:
            DataError: as for `encode`.
        """
        text = self._checked_text(messages, where, tools)
        turns: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                turns.append(self._turn(messages, number, text, where, tools))
            elif turns and message["role"] not in _BASIC_ROLES:
                before = self._template.around(messages, number, tools=tools)[0]
                if len(before) < turns[-1][1]:  # the result of a tool, put into the turn that called it
                    raise DataError(_cannot_tell(where, number, "it is rendered inside the assistant's turn"))
        if any(later[0] < earlier[1] for earlier, later in pairwise(turns)):
            raise DataError(_cannot_tell(where, len(messages) - 1, "turns overlap"))
        return text, turns

    # -- templates with marks ------------------------------------------------------------------------------------

    def _encode_marked(self, messages: Messages, where: str, tools: Any) -> EncodedChat:
        self._checked_text(messages, where, tools)
        encoded = self._template.apply(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
        edges = np.flatnonzero(np.diff(encoded["assistant_masks"], prepend=0, append=0)).tolist()
        if not edges and any(message["role"] == "assistant" for message in messages):
            raise DataError(f"{where}: the chat template's {{% generation %}} marks select nothing of the conversation")
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        return EncodedChat(ids, tuple(zip(edges[::2], edges[1::2], strict=True)))

    # -- templates without -----------------------------------------------------------------------------------------

    def _learn_turns(self) -> None:
        """Find the text that the template puts around an answer, from a conversation of two turns.

        Raises:
            ConfigError: the template does not append answers to questions.
        """
        render = self._template.render
        try:
            before = render([QUESTION])
            prompt = render([QUESTION], add_generation_prompt=True)
            start, *ends = self._template.around_last_answer
        except TemplateRefusal as error:
            raise ConfigError(f"the chat template refuses a question and an answer: {error.__cause__}") from error
        # Some templates end a conversation that waits for no answer with a token of its own.
        shared = num_shared(before, prompt, start)
        if QUESTION["content"] not in before[:shared] or len(ends) != 1:
            raise ConfigError(
                "the chat template does not append answers to questions, so that its turns cannot be found; mark them "
                "in the template with {% generation %} ... {% endgeneration %}"
            )
        self._generation_prompt = prompt[shared:]
        self._header, self._closing = start[shared:], ends[0]
        tokens = self._template.tokenizer.added_tokens_decoder.values()
        special = sorted({token.content for token in tokens if token.special and token.content})
        self._special_token = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self._ends_with_special_token = bool(self._special_token.search(self._closing))

    def _turn(self, messages: Messages, number: int, text: str, where: str, tools: Any) -> tuple[int, int]:
        """Return the characters of the assistant's message `number` in the rendered `text`.

        Raises:
            DataError: the characters cannot be distinguished from the template's.
        """
        try:
            found = self._template.around(messages, number, tools=tools)
        except TemplateRefusal as error:
            raise DataError(_cannot_tell(where, number, str(error.__cause__))) from error
        if len(found) != 2:
            raise DataError(_cannot_tell(where, number, f"its content is rendered {len(found) - 1} times"))
        before, after = found
        # In history a template may leave out what it inserts before the last answer (an empty thought), or the part of
        # the generation prompt that opens a thought.
        header = self._header
        if not before.endswith(header):
            header = self._generation_prompt
            while not before.endswith(header):
                header = header[:-1]
        header_start = len(before) - len(header)
        is_embedded = text.startswith(before[:header_start]) and text.endswith(after)
        if not is_embedded or header_start > len(text) - len(after):
            raise DataError(_cannot_tell(where, number, "the rest of the conversation depends on its content"))
        prompted = num_shared(self._generation_prompt, text[header_start:])
        if prompted < len(self._generation_prompt):  # what follows the header by chance begins like the rest of it
            prompted = min(prompted, num_shared(self._generation_prompt, header))
        start, end = header_start + prompted, len(text) - len(after)
        if self._ends_with_special_token and (token := self._special_token.search(after)):
            end += token.end()
        elif not self._ends_with_special_token and after.startswith(self._closing):
            end += len(self._closing)
        if start > end:
            raise DataError(_cannot_tell(where, number, "it ends before its header does"))
        return start, end

    # -- rendering -------------------------------------------------------------------------------------------------

    def _checked_text(self, messages: Messages, where: str, tools: Any) -> str:
        """Return the conversation as text.

        Raises:
            DataError: the template refuses a role, or leaves out a role or a call.
        """
        try:
            text = self._template.render(messages, tools=tools)
        except TemplateRefusal as error:
            role = self._refused_role(messages, tools)
            what = f"the role {role!r}" if role else "this order of roles: " + ", ".join(m["role"] for m in messages)
            raise DataError(f"{where}: the chat template refuses {what}: {error.__cause__}") from error
        for number, message in enumerate(messages):
            if message["role"] != "assistant" and not self._template.shows(messages, number, text, tools=tools):
                raise DataError(
                    f"{where}, messages[{number}]: the chat template leaves out the role {message['role']!r}, whose "
                    "content would be lost"
                )
        check_calls(messages, text, f"{where}, ")
        return text

    def _refused_role(self, messages: Messages, tools: Any) -> str | None:
        """Return the role without whose messages the template would render the conversation."""
        for role in dict.fromkeys(message["role"] for message in messages if message["role"] not in _BASIC_ROLES):
            rest = [message for message in messages if message["role"] != role]
            try:
                self._template.render(rest or [QUESTION], tools=tools)
            except TemplateRefusal:
                continue
            return role
        return None


def _cannot_tell(where: str, number: int, reason: str) -> str:
    return (
        f"{where}, messages[{number}]: cannot tell which part of the rendered conversation the assistant says: "
        f"{reason}; mark the turns in the chat template with {{% generation %}} ... {{% endgeneration %}}"
    )


def _tokens_of(turns: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the tokens [start, end) that hold a character of each turn; an empty range for an empty turn."""
    spans = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = spans[:, 0], spans[:, 1]
    ranges = []
    for start, end in turns:
        inside = np.flatnonzero((ends > start) & (starts < end))
        first = int(inside[0]) if len(inside) else int(np.searchsorted(starts, start))
        ranges.append((first, first + len(inside)))
    return tuple(ranges)
