"""Convert conversations to tokens, and mark the tokens of the assistant.

The tokens are those of `apply_chat_template(messages, tokenize=True)`: a conversation is rendered and tokenised whole,
and the tokenizer's offsets map characters to tokens. Turns are never tokenised one by one, because that would give
other tokens at their seams. They are never rendered one by one, because templates rewrite history (Qwen3 drops earlier
thoughts).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlite.data.chat.ends import EscapingTokenizer, LearntEnds
from rlite.data.chat.forms import Messages, Places, check_parts
from rlite.data.chat.template import ANSWER, QUESTION, ChatTemplate, TemplateRefusal, cause, num_shared, refusal
from rlite.data.readers.tables import check_text
from rlite.errors import ConfigError, DataError

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BASIC_ROLES = ("user", "assistant")


class Turn(NamedTuple):
    """A turn of the assistant in a rendered conversation: the characters [start, end)."""

    start: int
    end: int
    is_rewritten: bool
    """true if the template writes another text when the conversation ends with this turn"""
    is_prompted: bool
    """true if the turn follows the template's text that asks for an answer"""


@dataclass(frozen=True)
class EncodedChat:
    """A conversation as tokens. `turns` has the tokens [start, end) of each turn of the assistant."""

    input_ids: np.ndarray
    """[L] int32"""
    turns: tuple[tuple[int, int], ...]
    rewritten: frozenset[int] = frozenset()
    """indexes of turns that the template writes otherwise when the conversation ends with them"""
    unprompted: frozenset[int] = frozenset()
    """indexes of turns that follow another text than the one that asks for an answer"""
    is_answered: bool = True
    """true if the conversation ends with the assistant"""

    def mask(self, turns: Sequence[int] | None = None) -> np.ndarray:
        """Return [L] bool: true at the tokens of the given turns of the assistant (default: of all turns)."""
        mask = np.zeros(len(self.input_ids), dtype=bool)
        for start, end in self.turns if turns is None else (self.turns[turn] for turn in turns):
            mask[start:end] = True
        return mask


def check_messages(messages: Any, where: str, key: str = "messages") -> None:
    """Check that a value is a list of messages, {"role": text, "content": text, ...}.

    The content may also be a list of parts. It may be missing if the message has `tool_calls`.

    `where`: names the conversation in errors, such as "data.path=x.json, row 3".
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

    `escape_special_tokens`: make special tokens in messages plain text, except in the assistant's messages. See
    `EscapingTokenizer`. `ends`: ends learnt turns with tokens at which the model stops; None learns them as the
    template writes them. `options`: keyword arguments for `apply_chat_template`, such as `enable_thinking=False`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        escape_special_tokens: bool = False,
        ends: LearntEnds | None = None,
        **options: Any,
    ) -> None:
        if not tokenizer.is_fast:
            raise ConfigError(f"{type(tokenizer).__name__} gives no offsets; messages need a fast tokenizer")
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            remedy = "give raw texts, or set tokenizer.chat_template and save the tokenizer"
            raise ConfigError(f"the model's tokenizer has no chat template, which 'messages' need; {remedy}") from error
        self._is_marked = bool(_GENERATION_MARK.search(template)) and not escape_special_tokens
        self._template = ChatTemplate(EscapingTokenizer(tokenizer) if escape_special_tokens else tokenizer, options)
        self._ends, self._known_ends = ends, tuple[int, ...]()
        try:
            self._learn_turns()
        except ConfigError:
            if not self._is_marked:
                raise

    def encode(self, chats: Sequence[Messages], where: Sequence[str], tools: Sequence[Any] = ()) -> list[EncodedChat]:
        """Tokenise conversations.

        `where`: one name for each conversation, used in errors, such as "data.path=x.json, row 3". `tools`: the tools
        of each conversation, JSON schemas or None; empty if no conversation has tools. Returns one encoded conversation
        for each conversation.
        """
        tools = tools or [None] * len(chats)
        chats = [self._fitted(*chat) for chat in zip(chats, where, tools, strict=True)]
        if self._is_marked:
            return list(map(self._encode_marked, chats, where, tools))
        rendered = list(map(self._render, chats, where, tools))
        # `verbose` warns of texts longer than the model's context; what is too long is counted elsewhere.
        off = dict.fromkeys(("add_special_tokens", "return_attention_mask", "return_token_type_ids", "verbose"), False)
        found = self._template.tokenizer([text for text, _ in rendered], return_offsets_mapping=True, **off)
        rows = zip(chats, rendered, found["input_ids"], found["offset_mapping"], strict=True)
        return [
            EncodedChat(
                np.asarray(ids, dtype=np.int32),
                _tokens_of([turn[:2] for turn in turns], offsets),
                frozenset(index for index, turn in enumerate(turns) if turn.is_rewritten),
                frozenset(index for index, turn in enumerate(turns) if not turn.is_prompted),
                chat[-1]["role"] == "assistant",
            )
            for chat, (_, turns), ids, offsets in rows
        ]

    def ended(self, chat: EncodedChat, turns: Sequence[int], where: str) -> EncodedChat:
        """Return a conversation of which the given turns end with tokens at which the model stops."""
        if self._ends is None:
            return chat
        ids, found = chat.input_ids.tolist(), list(chat.turns)
        self._ends.num_turns += len(turns)
        self._ends.num_rewritten += len({*turns} & (chat.rewritten | chat.unprompted))
        for turn in turns:
            is_last = chat.is_answered and turn == len(found) - 1
            ids, end = self._ends.end_turn(ids, found[turn], self._known_ends, is_last, turn in chat.rewritten, where)
            found[turn] = found[turn][0], end
        return replace(chat, input_ids=np.asarray(ids, dtype=np.int32), turns=tuple(found))

    def _fitted(self, messages: Messages, where: str, tools: Any) -> Messages:
        check_messages(messages, where)
        return self._template.fitted(messages, f"{where}, ", tools)

    def _render(self, messages: Messages, where: str, tools: Any) -> tuple[str, list[Turn]]:
        """Return the conversation as text, with each turn of the assistant."""
        places = self._checked_places(messages, where, tools)
        turns = [self._turn(messages, number, places, where, tools) for number in assistant_messages(messages)]
        if any(later.start < earlier.end for earlier, later in pairwise(turns)):
            raise DataError(_cannot_tell(where, len(messages) - 1, "turns overlap"))
        return places.text, turns

    # -- templates with marks ------------------------------------------------------------------------------------

    def _encode_marked(self, messages: Messages, where: str, tools: Any) -> EncodedChat:
        places = self._checked_places(messages, where, tools)
        encoded = self._template.apply(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
        edges = np.flatnonzero(np.diff(encoded["assistant_masks"], prepend=0, append=0)).tolist()
        answers = assistant_messages(messages)
        if answers and not edges:
            raise DataError(f"{where}: the chat template's {{% generation %}} marks select nothing of the conversation")
        ids, turns = np.asarray(encoded["input_ids"], dtype=np.int32), tuple(zip(edges[::2], edges[1::2], strict=True))
        rewritten = frozenset(index for index, number in enumerate(answers) if places.missing(number))
        return EncodedChat(ids, turns, rewritten, is_answered=answers[-1:] == [len(messages) - 1])

    # -- templates without -----------------------------------------------------------------------------------------

    def _learn_turns(self) -> None:
        """Find the text that the template puts around an answer, from a conversation of two turns."""
        render = self._template.render
        try:
            before = render([QUESTION])
            prompt = render([QUESTION], add_generation_prompt=True)
            start, *after = self._template.around_last_answer
        except TemplateRefusal as error:
            told = f"{refusal(error.__cause__)} a question and an answer: {cause(error.__cause__)}"
            raise ConfigError(f"the chat template {told}") from error
        # Some templates end a conversation that waits for no answer with a token of its own.
        shared = num_shared(before, prompt, start)
        if QUESTION["content"] not in before[:shared] or len(after) != 1:
            remedy = "mark them in the template with {% generation %} ... {% endgeneration %}"
            lost = "does not append answers to questions, so that its turns cannot be found"
            raise ConfigError(f"the chat template {lost}; {remedy}")
        tokens = self._template.tokenizer.added_tokens_decoder.values()
        names = sorted({token.content for token in tokens if token.content.strip()}, key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        try:
            inner = self._template.around([QUESTION, ANSWER, QUESTION, ANSWER], 1)
        except TemplateRefusal:
            inner = [start, after[0]]
        headers = [prompt[shared:], start[shared:], inner[0][shared:]]
        self._generation_prompt, self._opener = headers[0], headers[0][: num_shared(*headers)]
        if not self._opener:  # what ends the question differs, as in a template that writes ends between turns alone
            size = num_shared(*(header[::-1] for header in headers))
            self._generation_prompt = self._opener = headers[0][len(headers[0]) - size :]
        shown = [*self._token.finditer(after[0][: num_shared(after[0], inner[-1])])]
        self._closing = after[0][: shown[-1].end()] if shown else after[0]
        self._tail = after[0].removeprefix(self._closing)
        between = self._token.match(inner[-1].lstrip())
        ends = self._token.findall(self._closing)[-1:]
        if between and not ends:  # the marker of any next role is an end
            ends = [between[0], *(token.content for token in tokens if token.special)]
        self._known_ends = tuple(map(self._template.tokenizer.convert_tokens_to_ids, ends))

    def _turn(self, messages: Messages, number: int, places: Places, where: str, tools: Any) -> Turn:
        """Return the assistant's message `number` in the rendered text."""
        found, is_last = self._written(messages, number, places, tools), number + 1 == len(messages)
        if found is None:
            reason = "its beginning or its end is not at one place, or depends on the rest of the conversation"
            raise DataError(_cannot_tell(where, number, reason))
        start, is_prompted, last, after, following = found
        rest, closing, is_rewritten = places.text[last:after], self._closing, False
        alone = None if is_last else self._template.alone(messages[number], tools=tools)
        shown = None if alone is None else self._written([QUESTION, messages[number]], 1, alone, tools)
        if alone is not None and shown is not None:
            closing = alone.text[shown[2] :].removesuffix(self._tail)
            generated = alone.text[shown[0] : shown[2]] + closing.rstrip()
            is_rewritten = not places.text.startswith(generated, start)
        closing = (rest if is_last else closing).removesuffix(self._tail)
        end = last + self._closing_size(rest, closing)
        if after < last or (end == last and following < len(messages) and self._token.search(closing)):
            raise DataError(_cannot_tell(where, following, "it is rendered inside the assistant's turn"))
        return Turn(start, end, is_rewritten, is_prompted)

    def _written(
        self, messages: Messages, number: int, places: Places, tools: Any
    ) -> tuple[int, bool, int, int, int] | None:
        """Return where the assistant's message begins, where its last part ends, and where the next part begins.

        The second value is true if the message follows the text that asks for an answer, the last one is the index of
        the next part's message. None if the places of the parts do not show this.
        """
        own = [part for part in places.parts.get(number, ()) if part.places]
        if not own or any(part.end is None or (part.times > 1 and part.name == "'content'") for part in own):
            return None
        ends = [place for part in own for place in part.places]
        before, inside, other = places.around(number, min(ends), min(ends))
        _, after, following = (0, inside, other) if inside < max(ends) else places.around(number, max(ends), max(ends))
        text, first, header = places.text, min(ends), self._opener
        # beside a message without a known place, which may hold such a header, the nearest one counts
        find = text.find if len(places.parts) > len(messages) else text.rfind
        at = find(header, before, first) if header else -1
        while at < 0 and self._token.search(header := header[:-1]):  # the answer itself may begin like the rest of it
            at = first - len(header) if text.endswith(header, before, first) else -1
        if at >= 0:
            is_prompted = text.startswith(prompt := self._generation_prompt, at)
            return at + len(prompt if is_prompted else header), is_prompted, max(ends), after, following
        try:  # the template asks for this answer in another way, such as after a tool's result
            asked = self._template.render(messages[:number], tools=tools, add_generation_prompt=True)
        except TemplateRefusal:
            return None
        is_there = text.startswith(asked) and before <= len(asked) <= first
        return (len(asked), True, max(ends), after, following) if is_there else None

    def _closing_size(self, rest: str, closing: str) -> int:
        """Return how much of the text after an answer ends the turn."""
        shared = rest[: num_shared(rest, closing)]
        tokens = [*self._token.finditer(shared)]
        if not tokens and self._token.search(closing):  # it ends otherwise in history
            tokens = [*self._token.finditer(rest)][:1]
        return tokens[-1].end() if tokens else len(shared)

    # -- rendering -------------------------------------------------------------------------------------------------

    def _checked_places(self, messages: Messages, where: str, tools: Any) -> Places:
        """Return the conversation as text, with the places of its parts."""
        try:
            text = self._template.render(messages, tools=tools)
        except TemplateRefusal as error:
            failed, role = error.__cause__, self._refused_role(messages, tools)
            what = f"the role {role!r}" if role else f"the conversation of {', '.join(m['role'] for m in messages)}"
            raise DataError(f"{where}: the chat template {refusal(failed)} {what}: {cause(failed)}") from error
        return self._template.check(messages, text, f"{where}, ", tools=tools)

    def _refused_role(self, messages: Messages, tools: Any) -> str | None:
        """Return the role without whose messages the template would render the conversation."""
        for role in dict.fromkeys(message["role"] for message in messages if message["role"] not in _BASIC_ROLES):
            rest = [message for message in messages if message["role"] != role]
            with suppress(TemplateRefusal):
                self._template.render(rest or [QUESTION], tools=tools)
                return role
        return None


def assistant_messages(messages: Messages) -> list[int]:
    """Return the indexes of the assistant's messages."""
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def _cannot_tell(where: str, number: int, reason: str) -> str:
    told = f"{where}, messages[{number}]: cannot tell which part of the rendered conversation the assistant says"
    return f"{told}: {reason}; mark the turns in the chat template with {{% generation %}} ... {{% endgeneration %}}"


def _tokens_of(turns: Sequence[Sequence[int]], offsets: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the tokens [start, end) that begin in each turn; an empty range for an empty turn.

    A token that begins in the header is the template's, even if it reaches into the answer.
    """
    spans = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = spans[:, 0], spans[:, 1]
    ranges = []
    for start, end in turns:
        inside = np.flatnonzero((ends > start) & (starts >= start) & (starts < end))
        first = int(inside[0]) if len(inside) else int(np.searchsorted(starts, start))
        ranges.append((first, first + len(inside)))
    return tuple(ranges)
