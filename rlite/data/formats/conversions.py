"""Conversions of rows to the form that rlite reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rlite.data.chat.answers import check_answer
from rlite.data.formats.conversations import ROLES, alpaca_prompt, answer_of, chat, prompt_messages, tools_of
from rlite.data.tables import Row, check_columns
from rlite.errors import DataError


def conversation(row: Row, where: str) -> Row:
    """Return the conversation of a row of `messages`."""
    return {"messages": chat(row["messages"], where, "messages"), **tools_of(row, where)}


def alpaca(row: Row, where: str) -> Row:
    """Return the conversation of an instruction and its output."""
    check_columns(row, {"output": str}, where)
    return {"messages": [*alpaca_prompt(row, where), {"role": "assistant", "content": row["output"]}]}


def completed(answer: str) -> Callable[[Row, str], Row]:
    """Return a conversion of a prompt and its answer, each a text or messages, of which the answer is learnt."""

    def convert(row: Row, where: str) -> Row:
        prompt, value = row["prompt"], row[answer]
        if isinstance(prompt, str) and not isinstance(value, (list, Mapping)):
            check_columns(row, {"prompt": str, answer: str}, where)
            return {"prompt": prompt, "response": value}
        if isinstance(value, str):
            value = [{"role": "assistant", "content": value}]
        completion = chat([value] if isinstance(value, Mapping) else value, where, answer)
        if not any(message["role"] == "assistant" for message in completion):
            raise DataError(f"{where}: {answer!r} has no turn of the assistant, hence nothing to learn")
        return {"messages": prompt_messages(prompt, where), "completion": completion, **tools_of(row, where)}

    return convert


def asked(column: str) -> Callable[[Row, str], Row]:
    """Return a conversion of the messages of a prompt, which keeps the other columns for rewards."""

    def convert(row: Row, where: str) -> Row:
        tools = row.get("tools")  # schemas for the template, or a column of the reward's
        has_json = isinstance(tools, list) or (isinstance(tools, str) and tools.lstrip().startswith("["))
        return {**row, column: chat(row[column], where, column), **(tools_of(row, where) if has_json else {})}

    return convert


def plain_text(row: Row, where: str) -> Row:
    """Return a text that is learnt whole."""
    check_columns(row, {"text": str}, where)
    return {"text": row["text"]}


def pair(row: Row, where: str, messages: list[Any]) -> Row:
    """Return a preference pair of a conversation and two answers.

    Args:
        row: row with the answers, and optionally `tools` and a `margin`.
        where: the row's name in messages.
        messages: the conversation before the answers.
    """
    sides = {side: answer_of(row[side], where, side) for side in ("chosen", "rejected")}
    return {"messages": messages, **sides, **tools_of(row, where), **_margin(row)}


def _margin(row: Row) -> Row:
    """Return the column `margin`, if the row has it; a CSV file has it as text."""
    if "margin" not in row:
        return {}
    margin = row["margin"]
    with suppress(ValueError):
        margin = float(margin) if isinstance(margin, str) else margin
    return {"margin": margin}


def prompted_pair(row: Row, where: str) -> Row:
    """Return the pair of a prompt and two answers, each a text or messages."""
    texts = {name: row[name] for name in ("prompt", "chosen", "rejected")}
    if all(isinstance(text, str) for text in texts.values()):
        return {**texts, **_margin(row)}
    return pair(row, where, prompt_messages(row["prompt"], where))


def has_implicit_prompt(row: Row) -> bool:
    """Return whether both sides are conversations: they begin with a message that is not the assistant's."""
    sides = [row[side] for side in ("chosen", "rejected")]
    if not all(isinstance(side, (list, tuple)) and side and isinstance(side[0], Mapping) for side in sides):
        return False
    roles = [side[0].get("role") or side[0].get("from") for side in sides]
    return all(isinstance(role, str) and ROLES.get(role) != "assistant" for role in roles)


def implicit_pair(row: Row, where: str) -> Row:
    """Return the pair of two conversations. Their prompt is their common beginning, and their answers follow it.

    Raises:
        DataError: the conversations do not share a prompt, or go on with another message than an answer.
    """
    chosen, rejected = (chat(row[side], where, side) for side in ("chosen", "rejected"))
    size = 0
    while size < min(len(chosen), len(rejected)) - 1 and chosen[size] == rejected[size]:
        size += 1
    if size == 0:
        raise DataError(f"{where}: 'chosen' and 'rejected' begin with different messages; expected the same prompt")
    answers = {"chosen": chosen[size:], "rejected": rejected[size:]}
    for side, answer in answers.items():
        check_answer(answer, f"{where}, from message {size} of both on", side)
    prompt, shared = row.get("prompt"), chosen[:size]
    is_same = [prompt] in ([None], [shared]) or any(prompt == message.get("content") for message in shared)
    if not is_same:
        raise DataError(
            f"{where}: 'prompt' is {prompt!r:.100}, and 'chosen' and 'rejected' begin with another prompt; "
            "the option columns.prompt=null of this data leaves the column out"
        )
    return pair({**row, **answers}, where, shared)


def labelled(row: Row, where: str) -> Row:
    """Return a prompt or a conversation with an answer that is labelled good or bad.

    Raises:
        DataError: the label is no truth value.
    """
    if isinstance(label := row["label"], str):  # as a CSV file has it
        row = {**row, "label": {"true": True, "false": False}.get(label.lower(), label)}
    if not isinstance(row["label"], bool):
        raise DataError(f"{where}: 'label' is {row['label']!r:.200}; expected true or false")
    prompt, completion = row.get("prompt"), row["completion"]
    if row.get("messages") is not None:
        messages = chat(row["messages"], where, "messages")
    elif isinstance(prompt, str) and isinstance(completion, str):
        check_columns(row, {"prompt": str, "completion": str}, where)
        return {"prompt": prompt, "completion": completion, "label": row["label"]}
    else:
        messages = prompt_messages(prompt, where)
    answer = answer_of(completion, where, "completion")
    return {"messages": messages, "completion": answer, "label": row["label"], **tools_of(row, where)}


def has_chat(*columns: str) -> Callable[[Row], bool]:
    """Return a function that tells whether one of the columns of a row holds messages."""
    return lambda row: any(isinstance(row[column], (list, tuple, Mapping)) for column in columns)
