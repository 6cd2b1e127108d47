"""Conversations to tokens, with exactly what the assistant says marked.

The tokens are those of `apply_chat_template(messages, tokenize=True)`: a conversation is rendered and tokenised whole,
and characters are mapped to tokens by the tokenizer's offsets. Turns are never tokenised one by one, which would give
other tokens at their seams, nor rendered one by one, because templates rewrite history (Qwen3 drops earlier thoughts).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from rlite.data.special_tokens import EscapingTokenizer
from rlite.data.tables import check_text
from rlite.errors import ConfigError, DataError

Messages = Sequence[Mapping[str, Any]]

STAND_IN = "\ue00d\uf3a7\ue9b1"
"""what shows where a template puts a content: private characters, in no text, and no template changes them"""
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text. `turns` are the characters [start, end) that the assistant says, one pair per turn."""

    text: str
    turns: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as tokens. `turns` are the tokens [start, end) that the assistant says, one pair per turn."""

    input_ids: np.ndarray
    """[L] int32"""
    turns: tuple[tuple[int, int], ...]

    def mask(self, turns: slice = slice(None)) -> np.ndarray:
        """[L] bool: the tokens of these of the assistant's turns (default: all)."""
        mask = np.zeros(len(self.input_ids), dtype=bool)
        for start, end in self.turns[turns]:
            mask[start:end] = True
        return mask


def check_messages(messages: Any, where: str, key: str = "messages") -> None:
    """Raise DataError, naming message and key, unless this is a list of {"role": text, "content": text, ...}.

    The content may be a list of parts, too, and may be missing where there are `tool_calls`.
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


class ChatEncoder:
    """Tokenises conversations of one tokenizer, with the tokens that the assistant says.

    A turn of the assistant is what follows the generation prompt: its thoughts, content and tool calls as the template
    renders them, and the token that ends the turn. The template's `{% generation %}` marks say where that is, if it has
    any. Otherwise it is found by rendering the conversation again with a stand-in for the content of one turn:
    what stands before and after the stand-in is the template's. Nothing is guessed: a template whose turns cannot be
    told apart in this way is an error.

    Args:
        tokenizer: a fast one with a chat template.
        escape_special_tokens: make special tokens in messages plain text, but for the assistant's. See
            `EscapingTokenizer`.
        options: for `apply_chat_template`, such as `enable_thinking=False`.

    Raises:
        ConfigError: the tokenizer has no chat template, is not a fast one, or its template's turns cannot be found.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, escape_special_tokens: bool = False, **options: Any) -> None:
        self._tokenizer: Any = tokenizer
        self._options = options
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
        if escape_special_tokens:
            self._tokenizer = EscapingTokenizer(tokenizer)
        if not self._is_marked:
            self._learn_turns()

    def encode(self, chats: Sequence[Messages], where: Sequence[str], tools: Sequence[Any] = ()) -> list[EncodedChat]:
        """Tokenise conversations.

        Args:
            chats: each a list of messages.
            where: a name of each for messages, such as "data.path=x.json, row 3".
            tools: the tools of each, as JSON schemas or None; empty: none has any.

        Raises:
            DataError: a conversation is malformed, the template refuses or leaves out one of its roles, or its turns
                cannot be told apart; names the conversation and the role.
        """
        tools = tools or [None] * len(chats)
        if self._is_marked:
            return [self._encode_marked(*chat) for chat in zip(chats, where, tools, strict=True)]
        rendered = [self.render(*chat) for chat in zip(chats, where, tools, strict=True)]
        # `verbose` warns of texts longer than the model's context; what is too long is counted elsewhere.
        encoded = self._tokenizer(
            [chat.text for chat in rendered],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        return [
            EncodedChat(np.asarray(ids, dtype=np.int32), _tokens_of(chat.turns, offsets))
            for chat, ids, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]

    def render(self, messages: Messages, where: str, tools: Any = None) -> RenderedChat:
        """A conversation as text with the assistant's turns, for a template without `{% generation %}` marks."""
        check_messages(messages, where)
        text = self._checked_text(messages, where, tools)
        turns: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                turns.append(self._turn(messages, number, text, where, tools))
            elif turns and message["role"] not in _BASIC_ROLES:
                before = self._text(_with_content(messages, number, STAND_IN), tools=tools).partition(STAND_IN)[0]
                if len(before) < turns[-1][1]:  # the result of a tool, put into the turn that called it
                    raise self._cannot_tell(where, number, "it is rendered inside the assistant's turn")
        if any(later[0] < earlier[1] for earlier, later in pairwise(turns)):
            raise self._cannot_tell(where, len(messages) - 1, "turns overlap")
        return RenderedChat(text, tuple(turns))

    # -- templates with marks ------------------------------------------------------------------------------------

    def _encode_marked(self, messages: Messages, where: str, tools: Any) -> EncodedChat:
        check_messages(messages, where)
        self._checked_text(messages, where, tools)
        encoded = self._tokenizer.apply_chat_template(
            list(messages), tools=tools, return_dict=True, return_assistant_tokens_mask=True, **self._options
        )
        edges = np.flatnonzero(np.diff(encoded["assistant_masks"], prepend=0, append=0)).tolist()
        if not edges and any(message["role"] == "assistant" for message in messages):
            raise DataError(f"{where}: the chat template's {{% generation %}} marks select nothing of the conversation")
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        return EncodedChat(ids, tuple(zip(edges[::2], edges[1::2], strict=True)))

    # -- templates without -----------------------------------------------------------------------------------------

    def _learn_turns(self) -> None:
        """What the template puts around an answer, from a conversation of two turns."""
        question = {"role": "user", "content": "question"}
        try:
            before = self._text([question])
            prompt = self._text([question], add_generation_prompt=True)
            whole = self._text([question, {"role": "assistant", "content": STAND_IN}])
        except (TemplateError, TypeError) as error:
            raise ConfigError(f"the chat template refuses a question and an answer: {error}") from error
        # Some templates end a conversation that waits for no answer with a token of its own.
        shared = _shared(before, prompt, whole)
        if question["content"] not in before[:shared] or whole.count(STAND_IN) != 1:
            raise ConfigError(
                "the chat template does not append answers to questions, so that its turns cannot be found; mark them "
                "in the template with {% generation %} ... {% endgeneration %}"
            )
        self._generation_prompt = prompt[shared:]
        self._header, self._closing = whole[shared:].split(STAND_IN)
        special = sorted({t.content for t in self._tokenizer.added_tokens_decoder.values() if t.special and t.content})
        self._special_token = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self._ends_with_special_token = bool(self._special_token.search(self._closing))

    def _turn(self, messages: Messages, number: int, text: str, where: str, tools: Any) -> tuple[int, int]:
        """The characters of `text`, the whole conversation, that the assistant says in message `number`."""
        variant = [*messages]
        variant[number] = {"role": "assistant", "content": STAND_IN}
        try:
            found = self._text(variant, tools=tools).split(STAND_IN)
        except (TemplateError, TypeError) as error:
            raise self._cannot_tell(where, number, str(error)) from error
        if len(found) != 2:
            raise self._cannot_tell(where, number, f"its content is rendered {len(found) - 1} times")
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
            raise self._cannot_tell(where, number, "the rest of the conversation depends on its content")
        prompted = _shared(self._generation_prompt, text[header_start:])
        if prompted < len(self._generation_prompt):  # what follows the header by chance begins like the rest of it
            prompted = min(prompted, _shared(self._generation_prompt, header))
        start, end = header_start + prompted, len(text) - len(after)
        if self._ends_with_special_token and (token := self._special_token.search(after)):
            end += token.end()
        elif not self._ends_with_special_token and after.startswith(self._closing):
            end += len(self._closing)
        if start > end:
            raise self._cannot_tell(where, number, "it ends before its header does")
        return start, end

    def _cannot_tell(self, where: str, number: int, reason: str) -> DataError:
        return DataError(
            f"{where}, messages[{number}]: cannot tell which part of the rendered conversation the assistant says: "
            f"{reason}; mark the turns in the chat template with {{% generation %}} ... {{% endgeneration %}}"
        )

    # -- rendering -------------------------------------------------------------------------------------------------

    def _text(self, messages: Messages, **options: Any) -> str:
        return self._tokenizer.apply_chat_template(list(messages), tokenize=False, **{**self._options, **options})

    def _checked_text(self, messages: Messages, where: str, tools: Any) -> str:
        """The conversation as text. Raises: DataError if the template refuses or leaves out a role."""
        try:
            text = self._text(messages, tools=tools)
        except (TemplateError, TypeError) as error:
            role = self._refused_role(messages, tools)
            what = f"the role {role!r}" if role else "this order of roles: " + ", ".join(m["role"] for m in messages)
            raise DataError(f"{where}: the chat template refuses {what}: {error}") from error
        for number, message in enumerate(messages):
            if message["role"] != "assistant" and not self._shows(messages, number, text, tools):
                raise DataError(
                    f"{where}, messages[{number}]: the chat template leaves out the role {message['role']!r}, whose "
                    "content would be lost"
                )
            for name in _called(message):
                if name not in text:
                    raise DataError(f"{where}, messages[{number}]: the chat template leaves out the call of {name!r}")
        return text

    def _shows(self, messages: Messages, number: int, text: str, tools: Any) -> bool:
        """Whether the content of message `number` is in the rendered `text`, as it is or in another form."""
        content = messages[number].get("content")
        if not isinstance(content, str) or content.strip() in text:
            return True
        # Some templates write the results of tools as JSON.
        return STAND_IN in self._text(_with_content(messages, number, STAND_IN), tools=tools)

    def _refused_role(self, messages: Messages, tools: Any) -> str | None:
        """The role without whose messages the template would render the conversation."""
        for role in dict.fromkeys(message["role"] for message in messages if message["role"] not in _BASIC_ROLES):
            rest = [message for message in messages if message["role"] != role]
            try:
                self._text(rest or [{"role": "user", "content": "question"}], tools=tools)
            except (TemplateError, TypeError):
                continue
            return role
        return None


def _with_content(messages: Messages, number: int, content: str) -> list[Mapping[str, Any]]:
    """The messages, of which message `number` says something else."""
    return [{**message, "content": content} if i == number else message for i, message in enumerate(messages)]


def _called(message: Mapping[str, Any]) -> list[str]:
    """The names of the tools that a message calls."""
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    names = [(call.get("function") or call).get("name") for call in calls]
    return [name for name in names if isinstance(name, str)]


def _shared(*texts: str) -> int:
    """How many characters texts have in common at their beginnings."""
    return sum(1 for _ in takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False)))


_BASIC_ROLES = ("user", "assistant")


def _tokens_of(turns: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The tokens [start, end) that hold a character of each turn; an empty range for an empty turn."""
    spans = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = spans[:, 0], spans[:, 1]
    ranges = []
    for start, end in turns:
        inside = np.flatnonzero((ends > start) & (starts < end))
        first = int(inside[0]) if len(inside) else int(np.searchsorted(starts, start))
        ranges.append((first, first + len(inside)))
    return tuple(ranges)
