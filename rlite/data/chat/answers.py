"""Answers to the messages of a prompt, as tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlite.data.chat.forms import Message
from rlite.data.chat.masks import ChatEncoder, EncodedChat, check_messages
from rlite.data.chat.parts import WEIGHTS
from rlite.data.chat.raw import answer_encoder
from rlite.data.tables import check_columns
from rlite.data.tokens import Tokens
from rlite.errors import DataError


def prompted_answer_encoder(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    answers: Sequence[str],
    columns: Mapping[str, type | tuple[type, ...]],
    where: str,
    template_options: Mapping[str, Any],
) -> Callable[[range], list[list[Tokens]]]:
    """Check rows of a prompt with answers, and return a function that tokenises them.

    All rows have the form of the first row: a text `prompt`, or `messages` that end before the assistant's answer. An
    answer is a text, or after messages a list of messages; see `check_answer`. Only the answer is learnt, with its end:
    in a raw text, the end-of-sequence token.

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
    answer_types = (str, list) if is_chat else str
    needed = {"messages" if is_chat else "prompt": list if is_chat else str, **dict.fromkeys(answers, answer_types)}
    for number, row in enumerate(rows):
        at = f"{where}, row index {number}"
        check_columns(row, {**needed, **columns}, at)
        if is_chat:
            check_prompt(row["messages"], at, " and ".join(answers))
            for answer in answers:
                check_answer(answer_messages(row[answer]), at, answer)
    if not is_chat:
        return answer_encoder(tokenizer, rows, answers, template_options.get("ends"))
    return chat_answer_encoder(ChatEncoder(tokenizer, **template_options), rows, answers, where)


def chat_answer_encoder(
    encoder: ChatEncoder, rows: Sequence[Mapping[str, Any]], answers: Sequence[str], where: str
) -> Callable[[range], list[list[Tokens]]]:
    """Return a function that tokenises `messages` with each of their answers.

    A sequence ends with its answer. Only the assistant's messages in the answer are learnt. Text that a template writes
    after the answer is removed, so a row ends as a generated row does.

    Args:
        encoder: encoder of conversations.
        rows: the table.
        answers: columns with answers, each a text or messages.
        where: the table's name in messages, such as "data.path=x.json".

    Returns:
        A function: row numbers -> for each row, one sequence for each answer.
    """

    def encode(numbers: range) -> list[list[Tokens]]:
        sides = [(number, answer_messages(rows[number][answer])) for number in numbers for answer in answers]
        chats = [[*rows[number]["messages"], *said] for number, said in sides]
        names = [f"{where}, row index {number}" for number, _ in sides]
        encoded = encoder.encode(chats, names, [rows[number].get("tools") for number, _ in sides])
        tokens = []
        for chat, messages, (_, said), name in zip(encoded, chats, sides, names, strict=True):
            turns = learnt_turns(chat, messages, len(messages) - len(said), name)
            ended = encoder.ended(chat, turns, name)
            end = ended.turns[-1][1]
            tokens.append((ended.input_ids[:end], ended.mask(turns)[:end]))
        size = len(answers)
        return [tokens[start : start + size] for start in range(0, len(tokens), size)]

    return encode


def answer_messages(answer: str | Sequence[Message]) -> Sequence[Message]:
    """Return an answer, a text or messages, as messages."""
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def learnt_turns(chat: EncodedChat, messages: Sequence[Message], first: int, where: str) -> list[int]:
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
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    learnt = [
        index
        for index, number in enumerate(answers)
        if number >= first and all(messages[number].get(key) in (None, 1) for key in WEIGHTS)
    ]
    shown = len(chat.turns)
    if len(answers) == shown:
        return learnt
    if len(answers) == len(learnt):
        return list(range(shown))
    if learnt == [len(answers) - 1] and shown:
        return [shown - 1]
    raise DataError(
        f"{where}: the chat template shows {shown} of {len(answers)} turns of the assistant, so "
        f"{'the turns of the completion' if first else 'the turns to learn'} cannot be found"
    )


def check_answer(messages: Sequence[Message], where: str, column: str) -> None:
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
        raise DataError(
            f"{where}: {column!r} has messages of the roles {', '.join(roles)}; expected an answer: messages of the "
            "assistant, with results of tools between them"
        )


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
        raise DataError(
            f"{where}: 'messages' ends with the assistant; expected the prompt alone, to which {answers} "
            f"{'are answers' if ' ' in answers else 'is the answer'}"
        )
