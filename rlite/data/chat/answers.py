"""Learnt answers to the messages of a prompt, as tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlite.data.chat.forms import WEIGHTS, Message, Messages
from rlite.data.chat.masks import ChatEncoder, EncodedChat, assistant_messages, check_messages
from rlite.data.readers.tables import check_columns
from rlite.data.source import Table
from rlite.data.tokens import Encode, Tokens, answer_encoder
from rlite.errors import DataError

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

    `template_options`: options of the chat template, such as `enable_thinking=False`, and of `ChatEncoder`. Returns a
    function: row numbers -> for each row, one sequence for each answer.
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

    Returns a function: row numbers -> for each row, one sequence for each conversation.
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
    """Return the indexes of the assistant's turns that are learnt: from a message on, unless a weight is 0 or false."""
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
    """Check that messages answer a prompt: of the assistant, with results of tools between them."""
    check_messages(messages, where, column)
    roles = [message["role"] for message in messages]
    if not roles[0] == roles[-1] == "assistant" or {*roles} & {"user", "system", "developer"}:
        expected = "an answer: messages of the assistant, with results of tools between them"
        raise DataError(f"{where}: {column!r} has messages of the roles {', '.join(roles)}; expected {expected}")


def check_prompt(messages: Any, where: str, answers: str) -> None:
    """Check that messages are a prompt."""
    check_messages(messages, where)
    if messages[-1]["role"] == "assistant":
        what = f"to which {answers} {'are answers' if ' ' in answers else 'is the answer'}"
        raise DataError(f"{where}: 'messages' ends with the assistant; expected the prompt alone, {what}")
