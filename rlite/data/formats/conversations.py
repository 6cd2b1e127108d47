"""Conversations in the forms in which datasets hold them, converted to messages with `role` and `content`."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
