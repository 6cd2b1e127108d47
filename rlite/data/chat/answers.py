"""Answers to the messages of a prompt, as tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlite.data.chat.masks import ChatEncoder, check_messages
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
    answer is a text. Only the answer is learnt, with its end: in a raw text, the end-of-sequence token.

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
    needed = {"messages" if is_chat else "prompt": list if is_chat else str, **dict.fromkeys(answers, str), **columns}
    for number, row in enumerate(rows):
        at = f"{where}, row index {number}"
        check_columns(row, needed, at)
        if is_chat:
            check_prompt(row["messages"], at, " and ".join(answers))
    if not is_chat:
        return answer_encoder(tokenizer, rows, answers, template_options.get("ends"))
    return chat_answer_encoder(ChatEncoder(tokenizer, **template_options), rows, answers, where)


def chat_answer_encoder(
    encoder: ChatEncoder, rows: Sequence[Mapping[str, Any]], answers: Sequence[str], where: str
) -> Callable[[range], list[list[Tokens]]]:
    """Return a function that tokenises `messages` with each of their answers.

    A sequence ends with its answer. Only the answer is learnt. Text that a template writes after the answer is removed,
    so a row ends as a generated row does.

    Args:
        encoder: encoder of conversations.
        rows: the table.
        answers: columns with answers.
        where: the table's name in messages, such as "data.path=x.json".

    Returns:
        A function: row numbers -> for each row, one sequence for each answer.
    """

    def encode(numbers: range) -> list[list[Tokens]]:
        sides = [(number, answer) for number in numbers for answer in answers]
        chats = [
            [*rows[number]["messages"], {"role": "assistant", "content": rows[number][answer]}]
            for number, answer in sides
        ]
        names = [f"{where}, row index {number}" for number, _ in sides]
        encoded = [
            encoder.ended(chat, [len(chat.turns) - 1], name)
            for chat, name in zip(
                encoder.encode(chats, names, [rows[number].get("tools") for number, _ in sides]), names, strict=True
            )
        ]
        ends = [chat.turns[-1][1] for chat in encoded]
        tokens = [
            (chat.input_ids[:end], chat.mask([len(chat.turns) - 1])[:end])
            for chat, end in zip(encoded, ends, strict=True)
        ]
        size = len(answers)
        return [tokens[start : start + size] for start in range(0, len(tokens), size)]

    return encode


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
