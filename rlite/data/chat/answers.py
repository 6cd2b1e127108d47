"""Answers to the messages of a prompt, as tokens.

Turns of the assistant in a rendered conversation: the text and the tokens that follow an answer.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from rlite.data.chat.forms import WEIGHTS, Message, Messages
from rlite.data.chat.masks import ChatEncoder, EncodedChat, assistant_messages, check_messages
from rlite.data.chat.template import ChatTemplate, Ending, Tokenizer, called_names
from rlite.data.prompts import bounded_tokens, end_of, special_ids
from rlite.data.readers.tables import check_columns
from rlite.data.source import Table
from rlite.data.tokens import Encode, Tokens, answer_encoder
from rlite.errors import DataError
from rlite.types import StopReason

Chats = Callable[[Mapping[str, Any]], list[tuple[list[Message], int]]]
"""a row -> its conversations, each with the number of the first message that is learnt"""


def prompted_answer_encoder(
    rows: Table,
    tokenizer: PreTrainedTokenizerBase,
    answers: Sequence[str],
    columns: Mapping[str, type | tuple[type, ...]],
    where: str,
    template_options: Mapping[str, Any],
) -> Encode:
    """Check rows of a prompt with answers, and return a function that tokenises them.

    All rows have the form of the first row: a text `prompt`, or `messages` that end before the assistant's answer. An
    answer is a text, or after messages a list of messages; see `check_answer`. Only the answer is learnt, with its end:
    in a raw text, the end-of-sequence token. A sequence ends with its answer.

    Args:
        rows: the table.
        tokenizer: the model's tokenizer.
        answers: columns with answers.
        columns: types of further columns that every row must have.
        where: the table's name in messages, such as "data.path=x.json".
        template_options: options of the chat template, such as `enable_thinking=False`, and of `ChatEncoder`.

    Returns:
        A function: row numbers -> for each row, one sequence for each answer.

    Raises:
        DataError: a row has another form; the message names row and column.
        ConfigError: the tokenizer cannot do this.
    """
    is_chat = bool(rows) and rows[0].get("messages") is not None
    needed: dict[str, Any] = dict.fromkeys(answers, (str, list) if is_chat else str)
    needed |= {"messages": list} if is_chat else {"prompt": str}
    for number, row in enumerate(rows):
        at = f"{where}, row index {number}"
        check_columns(row, {**needed, **columns}, at)
        if is_chat:
            check_prompt(row["messages"], at, " and ".join(answers))
            for answer in answers:
                check_answer(answer_messages(row[answer]), at, answer)
    if not is_chat:
        return answer_encoder(tokenizer, rows, answers, template_options.get("ends"))

    def conversations(row: Mapping[str, Any]) -> list[tuple[list[Message], int]]:
        prompt = row["messages"]
        return [([*prompt, *answer_messages(row[answer])], len(prompt)) for answer in answers]

    return chat_encoder(ChatEncoder(tokenizer, **template_options), rows, conversations, where)


def chat_encoder(
    encoder: ChatEncoder, rows: Table, chats: Chats, where: str, last_turn_only: bool = False, is_cut: bool = True
) -> Encode:
    """Return a function that tokenises the conversations of rows. Only messages of the assistant are learnt.

    Args:
        encoder: encoder of conversations.
        rows: the table.
        chats: returns the conversations of a row.
        where: the table's name in messages, such as "data.path=x.json".
        last_turn_only: learn only the last of the turns.
        is_cut: end a sequence with its last turn: text that a template writes after it is removed, so a row ends as a
            generated row does.

    Returns:
        A function: row numbers -> for each row, one sequence for each conversation.
    """

    def encode(numbers: range) -> list[list[Tokens]]:
        found = [(number, *each) for number in numbers for each in chats(rows[number])]
        names = [f"{where}, row index {number}" for number, *_ in found]
        tools = [rows[number].get("tools") for number, *_ in found]
        encoded = encoder.encode([messages for _, messages, _ in found], names, tools)
        tokens: dict[int, list[Tokens]] = {number: [] for number in numbers}
        for chat, (number, messages, first), name in zip(encoded, found, names, strict=True):
            turns = learnt_turns(chat, messages, first, name)[-1 if last_turn_only else 0 :]
            ended = encoder.ended(chat, turns, name)
            end = ended.turns[-1][1] if is_cut else None
            tokens[number].append((ended.input_ids[:end], ended.mask(turns)[:end]))
        return list(tokens.values())

    return encode


def answer_messages(answer: str | Messages) -> Messages:
    """Return an answer, a text or messages, as messages."""
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def learnt_turns(chat: EncodedChat, messages: Messages, first: int, where: str) -> list[int]:
    """Return the indexes of the assistant's turns that are learnt: from a message on, unless a weight is 0 or false.

    Args:
        chat: the tokens of the messages.
        messages: the conversation.
        first: number of the first message that is learnt.
        where: names the row in errors.

    Raises:
        DataError: a weight is neither 0 nor 1, or the turns cannot be told from the others.
    """
    for number, message in enumerate(messages[first:], start=first):
        for key in WEIGHTS:
            if message.get(key) not in (None, 0, 1):
                found = f"{key!r} is {message[key]!r:.100}"
                raise DataError(f"{where}, messages[{number}]: {found}; expected 0, 1, true or false")
    answers, shown = assistant_messages(messages), len(chat.turns)
    has_weight = [all(messages[number].get(key) in (None, 1) for key in WEIGHTS) for number in answers]
    learnt = [index for index, number in enumerate(answers) if number >= first and has_weight[index]]
    if len(answers) == shown:
        return learnt
    if len(answers) == len(learnt):
        return list(range(shown))
    if learnt == [len(answers) - 1] and shown:
        return [shown - 1]
    which = "the turns of the completion" if first else "the turns to learn"
    told = f"the chat template shows {shown} of {len(answers)} turns of the assistant"
    raise DataError(f"{where}: {told}, so {which} cannot be found")


def check_answer(messages: Messages, where: str, column: str) -> None:
    """Check that messages answer a prompt: of the assistant, with results of tools between them.

    Args:
        messages: the answer.
        where: names the row in errors.
        column: names the answer in errors.

    Raises:
        DataError: the messages have another form, end with another role, or ask again.
    """
    check_messages(messages, where, column)
    roles = [message["role"] for message in messages]
    if not roles[0] == roles[-1] == "assistant" or {*roles} & {"user", "system", "developer"}:
        expected = "an answer: messages of the assistant, with results of tools between them"
        raise DataError(f"{where}: {column!r} has messages of the roles {', '.join(roles)}; expected {expected}")


def check_prompt(messages: Any, where: str, answers: str) -> None:
    """Check that messages are a prompt.

    Args:
        messages: the value to check.
        where: names the row in errors.
        answers: names the columns with answers in errors.

    Raises:
        DataError: the messages have another form, or end with the assistant.
    """
    check_messages(messages, where)
    if messages[-1]["role"] == "assistant":
        what = f"to which {answers} {'are answers' if ' ' in answers else 'is the answer'}"
        raise DataError(f"{where}: 'messages' ends with the assistant; expected the prompt alone, {what}")


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

    Args:
        template: the chat template.
        turn: has messages and an answer.
        messages: begin with the turn's messages and its answer.
        text: these messages, rendered.

    Returns:
        The text that follows the answer, from the template's end of the answer on. None if the text before it differs,
        other than in white space, from the text that the model has read and written.
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

    Args:
        tokenizer: the model's tokenizer.
        tokens: the tokens of the answer.
        stops: the stop strings.
        num_end: tokens at its end that are left out if no stop string has ended it.
        skips: whether special tokens are left out of the first text.

    Returns:
        Both texts; the second one is empty if the answer has no stop string.
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

    Args:
        tokenizer: the model's tokenizer.
        tokens: the sequence.
        stops: the stop strings. Special tokens are text here.
        start: index of the first token that is new since the last search.
        begin: index of the first token of the answer.

    Returns:
        The number; None if the answer has no stop string.
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

    Args:
        tokenizer: the model's tokenizer.
        text: follows the answer, from the template's end of the answer on.
        output: the tokens of the answer.
        stop_reason: why the answer ended.
        limit: tokens that fit into the model's context; None does not bound the text.
        end_ids: tokens that end an answer, beside the tokenizer's special tokens.
        has_end: the text begins with the template's end of the answer, whose token `end_ids` may lack.

    Returns:
        The tokens; and False if the model has ended its answer with another token than the template does.

    Raises:
        TooManyTokens: the text is far longer than `limit` tokens.
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
