"""Stops of generated answers: stop strings, end tokens, and the text and tokens that follow an answer."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from rlite.data.chat.forms import Message, Messages
from rlite.data.chat.template import ChatTemplate, Ending, Tokenizer, called_names
from rlite.data.prompts import bounded_tokens, end_of, special_ids
from rlite.types import StopReason


class AnsweredTurn(Protocol):
    """A conversation that a model has answered."""

    messages: Messages | None
    """the conversation"""
    tools: Any
    answer: Message | None
    """the answer as a message"""
    prompt_text: str
    """the conversation as the template has rendered it"""
    text: str
    """the answer as the model has written it, without its end"""


def text_after(template: ChatTemplate, turn: AnsweredTurn, messages: Messages, text: str) -> str | None:
    """Return the part of a rendered conversation after the model's answer in a turn.

    Returns the text that follows the answer, from the template's end of the answer on. None if the text before it
    differs, other than in white space, from the text that the model has read and written.
    """
    if (ending := template.ending) is None:
        return None
    end = _end_of(turn.prompt_text + turn.text + ending.closing, text)
    if end is not None:
        return ending.closing.rstrip() + text[end:]
    return _text_after_calls(template, turn, messages, text, ending)


def split_at_stop(
    tokenizer: Any, tokens: Sequence[int], stops: Sequence[str], num_end: int = 0, skips: bool = True
) -> tuple[str, str]:
    """Return the text before the first stop string, and the text from there on. Special tokens are text here.

    Returns both texts; the second one is empty if the answer has no stop string.
    """
    whole = tokenizer.decode(tokens, skip_special_tokens=False) if stops else ""
    start = min((at for stop in stops if (at := whole.find(stop)) >= 0), default=-1)
    if start < 0:
        return tokenizer.decode(tokens[: len(tokens) - num_end], skip_special_tokens=skips), ""

    def length(num: int) -> int:
        return len(tokenizer.decode(tokens[:num], skip_special_tokens=False))

    num = bisect_right(range(len(tokens)), start, key=length) - 1
    text = tokenizer.decode(tokens[:num], skip_special_tokens=skips)
    if not skips or tokens[num] not in special_ids(tokenizer):
        text += whole[length(num) : start]  # the stop string begins within this token
    return text, whole[start:]


def length_at_stop(
    tokenizer: Any, tokens: Sequence[int], stops: Sequence[str], start: int, begin: int = 0
) -> int | None:
    """Return the number of tokens with which a sequence reaches the end of the first stop string of its answer.

    `stops`: the stop strings. Special tokens are text here. Returns the number; None if the answer has no stop string.
    """
    # a token holds at least one byte, so a stop string begins at most this many tokens before its end
    reach = max(len(stop.encode()) for stop in stops) + 8
    for length in range(start + 1, len(tokens) + 1):
        text = tokenizer.decode(tokens[max(length - reach, begin) : length], skip_special_tokens=False)
        if any(stop in text for stop in stops):
            return length
    return None


def tokens_after(
    tokenizer: Tokenizer,
    text: str,
    output: Sequence[int],
    stop_reason: StopReason,
    limit: int | None = None,
    end_ids: Collection[int] = (),
    has_end: bool = True,
) -> tuple[list[int], bool]:
    """Return the tokens of text that follows an answer, without a first end token that the model has already written.

    `limit`: tokens that fit into the model's context; None does not bound the text. Returns the tokens; and False if
    the model has ended its answer with another token than the template does.
    """
    tokens = bounded_tokens(tokenizer, text, limit)
    is_ended = bool(end_of(output, stop_reason, special_ids(tokenizer).union(end_ids)))
    if (is_ended or has_end) and stop_reason == "stop" and tokens[:1] == list(output[-1:]):
        return tokens[1:], True
    return tokens, not is_ended


def without_end(tokenizer: Any, tokens: Sequence[int]) -> list[int]:
    """Return the tokens of an answer without special tokens and white space at its end."""
    special, end = special_ids(tokenizer), len(tokens)
    while end and (tokens[end - 1] in special or not tokenizer.decode(tokens[end - 1 : end]).strip()):
        end -= 1
    return list(tokens[:end])


def _text_after_calls(
    template: ChatTemplate, turn: AnsweredTurn, messages: Messages, text: str, ending: Ending
) -> str | None:
    """Return the same part for an answer with calls, which a template may write in other words than the model."""
    assert turn.messages is not None
    assert turn.answer is not None
    answered = messages[: len(turn.messages) + 1]
    before = template.render(answered, tools=turn.tools, add_generation_prompt=False).removesuffix(ending.tail)
    names = called_names(turn.answer)
    if not names or not before.endswith(ending.closing) or not text.startswith(before):
        return None
    end = _end_of(turn.prompt_text + turn.answer["content"], before)
    if end is None or not all(name in before[end:] for name in names):
        return None
    return ending.closing + text[len(before) :]


def _end_of(beginning: str, text: str) -> int | None:
    """Return where `beginning` ends in `text`; None if the text does not begin with it, except for white space."""
    expected, matched = "".join(beginning.split()), 0
    for piece in re.finditer(r"\S+", text):
        size = min(len(piece[0]), len(expected) - matched)
        if piece[0][:size] != expected[matched : matched + size]:
            return None
        matched += size
        if matched == len(expected):
            return piece.start() + size
    return None
