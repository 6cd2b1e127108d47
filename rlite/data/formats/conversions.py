"""Conversions of rows to the form that rlite reads.

Conversations in the forms in which datasets hold them, converted to messages with `role` and `content`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rlite.data.chat.answers import check_answer
from rlite.data.chat.masks import check_messages
from rlite.data.tables import Row, check_columns, check_text
from rlite.errors import DataError, did_you_mean

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
"""ShareGPT's `from` -> role"""
SYSTEM_ROLES = ("system", "developer")


def chat(value: Any, where: str, column: str) -> list[Any]:
    """Return messages with `role` and `content`. ShareGPT's `from` and `value` are converted.

    Messages, and their `tool_calls`, may be JSON texts.

    Args:
        value: the messages.
        where: the row's name in messages.
        column: the column's name in messages.

    Raises:
        DataError: the value is no list of messages, or a sender is unknown.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _json(value, f"{where}: {column!r}")
    if isinstance(value, (list, tuple)):
        value = [_message(message, f"{where}, {column}[{number}]") for number, message in enumerate(value)]
    check_messages(value, where, column)
    return value


def _message(message: Any, where: str) -> Any:
    if not isinstance(message, Mapping):
        return message
    if isinstance(text := message.get("tool_calls"), str):
        calls = _json(text, f"{where}: 'tool_calls'") if text.strip() else None
        message = {**message, "tool_calls": calls}
    if message.get("from") is None or message.get("role") is not None:
        return message
    sender, content = message["from"], message.get("value")
    if not isinstance(sender, str) or sender not in ROLES:
        raise DataError(f"{where}: 'from' is {sender!r:.200}; {did_you_mean(str(sender), ROLES)}")
    if not isinstance(content, str):
        raise DataError(f"{where}: 'value' is {content!r:.200}; expected a text")
    others = {key: value for key, value in message.items() if key not in ("from", "value") and value is not None}
    if sender != "function_call":
        return {**others, "role": ROLES[sender], "content": content}
    found = _json(content, f"{where}: 'value'")
    calls = [_call(call) for call in (found if isinstance(found, list) else [found])]
    if None in calls:
        raise DataError(f"{where}: 'value' is {content!r:.200}; expected calls, {{'name': ..., 'arguments': {{...}}}}")
    return {**others, "role": "assistant", "content": "", "tool_calls": calls}


def _call(call: Any) -> Any:
    """Return a call of ShareGPT's, or of OpenAI's, in OpenAI's form; None if the value is no call."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        return None
    arguments = function.get("arguments", function.get("parameters", {}))
    own_id = {"id": call["id"]} if "id" in call else {}
    return {**own_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON: {error}") from error


def prompt_messages(prompt: Any, where: str) -> list[Any]:
    """Return a prompt as messages; a text becomes a user's message.

    Args:
        prompt: a text or messages.
        where: the row's name in messages.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return chat(prompt, where, "prompt")


def answer_of(value: Any, where: str, column: str) -> str | list[Any]:
    """Return an answer: its messages, or the text if it is a text, or one message of a text alone.

    Args:
        value: a text, a message, or a list of messages.
        where: the row's name in messages.
        column: the column's name in messages.

    Raises:
        DataError: the value is something else.
    """
    if isinstance(value, str):
        check_text(value, f"{where}: {column!r}")
        return value
    messages = chat([value] if isinstance(value, Mapping) else value, where, column)
    check_answer(messages, where, column)
    first = messages[0]
    is_text = len(messages) == 1 and first.keys() <= {"role", "content"} and isinstance(first["content"], str)
    return first["content"] if is_text else messages


def _system(row: Row, where: str) -> list[Any]:
    """Return the message of a `system` column, if it has a text."""
    if not row.get("system"):
        return []
    check_columns(row, {"system": str}, where)
    return [{"role": "system", "content": row["system"]}]


def tools_of(row: Row, where: str) -> Row:
    """Return the column `tools`, if the row has it. The column, a tool, or a part of a tool may be a JSON text.

    Raises:
        DataError: the column is no list.
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _json(tools, f"{where}: 'tools'") if tools.strip() else None
    if tools is None:
        return {}
    if not isinstance(tools, list):
        raise DataError(f"{where}: 'tools' is {type(tools).__name__}; expected a list of JSON schemas")
    return {"tools": [_schema(tool, f"{where}: 'tools'") for tool in tools]} if tools else {}


def _schema(value: Any, where: str) -> Any:
    """Return the schema of a tool. The schema, its function and its parameters may be JSON texts."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _json(value, where)
    if not isinstance(value, Mapping):
        return value
    return {key: _schema(item, where) if key in ("function", "parameters") else item for key, item in value.items()}


def sharegpt(row: Row, where: str) -> Row:
    """Return `messages`, and `tools` if there are some, of a row of `conversations`."""
    messages = chat(row["conversations"], where, "conversations")
    own = [] if messages[0]["role"] in SYSTEM_ROLES else _system(row, where)
    return {"messages": [*own, *messages], **tools_of(row, where)}


def alpaca_prompt(row: Row, where: str) -> list[Any]:
    """Return an instruction as messages: system, earlier turns, and the instruction with its input below it.

    Raises:
        DataError: `input` or `history` has another form.
    """
    check_columns(row, {"instruction": str}, where)
    extra = row.get("input") or ""
    if not isinstance(extra, str):
        raise DataError(f"{where}: 'input' is {type(extra).__name__}; expected a text")
    earlier: list[Any] = []
    for number, turn in enumerate(row.get("history") or ()):
        if not isinstance(turn, (list, tuple)) or [type(text) for text in turn] != [str, str]:
            raise DataError(f"{where}: history[{number}] is {turn!r:.100}; expected [instruction, answer]")
        earlier += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    question = {"role": "user", "content": f"{row['instruction']}\n{extra}" if extra else row["instruction"]}
    return chat([*_system(row, where), *earlier, question], where, "instruction")


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
