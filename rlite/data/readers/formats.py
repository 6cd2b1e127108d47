"""The table of formats: how each is recognised, and its conversion to the form of rlite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from rlite.data.chat.answers import check_answer
from rlite.data.chat.masks import check_messages
from rlite.data.readers.tables import Row, check_columns, check_text, parse_json
from rlite.errors import ConfigError, DataError, did_you_mean

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""ShareGPT's `from` -> role"""
SYSTEM_ROLES = ("system", "developer")


def chat(value: Any, where: str, column: str) -> list[Any]:
    """Return messages with `role` and `content`. ShareGPT's `from` and `value` are converted.

    Messages, and their `tool_calls`, may be JSON texts.
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
    return parse_json(text, lambda _: where)


def prompt_messages(prompt: Any, where: str) -> list[Any]:
    """Return a prompt as messages; a text becomes a user's message."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return chat(prompt, where, "prompt")


def answer_of(value: Any, where: str, column: str) -> str | list[Any]:
    """Return an answer: its messages, or the text if it is a text, or one message of a text alone."""
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
    """Return the column `tools`, if the row has it. The column, a tool, or a part of a tool may be a JSON text."""
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _json(tools, f"{where}: 'tools'") if tools.strip() else None
    if tools is not None and not isinstance(tools, list):
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


def instruction(row: Row, where: str) -> Row:
    """Return an instruction as messages: system, earlier turns, and the instruction with its input below it."""
    extra = row.get("input") or ""
    check_columns({**row, "input": extra}, {"instruction": str, "input": str}, where)
    earlier: list[Any] = []
    for number, turn in enumerate(row.get("history") or ()):
        if not isinstance(turn, (list, tuple)) or [type(text) for text in turn] != [str, str]:
            raise DataError(f"{where}: history[{number}] is {turn!r:.100}; expected [instruction, answer]")
        earlier += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    question = {"role": "user", "content": f"{row['instruction']}\n{extra}" if extra else row["instruction"]}
    return {"messages": chat([*_system(row, where), *earlier, question], where, "instruction")}


def conversation(row: Row, where: str) -> Row:
    """Return the conversation of a row of `messages`."""
    return {"messages": chat(row["messages"], where, "messages"), **tools_of(row, where)}


def alpaca(row: Row, where: str) -> Row:
    """Return the conversation of an instruction and its output."""
    check_columns(row, {"output": str}, where)
    return {"messages": [*instruction(row, where)["messages"], {"role": "assistant", "content": row["output"]}]}


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


def beside(convert: Callable[[Row, str], Row], *replaced: str) -> Callable[[Row, str], Row]:
    """Return a conversion that keeps the other columns for rewards, except replaced ones."""

    def converted(row: Row, where: str) -> Row:
        return {name: value for name, value in row.items() if name not in replaced} | convert(row, where)

    return converted


def plain_text(row: Row, where: str) -> Row:
    """Return a text that is learnt whole."""
    check_columns(row, {"text": str}, where)
    return {"text": row["text"]}


_SIDES = ("chosen", "rejected")


def answered(row: Row, where: str, messages: list[Any], answers: Sequence[str], **others: Any) -> Row:
    """Return a conversation with its answers, and the tools of the row."""
    made = {name: answer_of(row[name], where, name) for name in answers}
    return {"messages": messages, **made, **others, **tools_of(row, where)}


def prompted(row: Row, where: str, answers: Sequence[str], **others: Any) -> Row:
    """Return a prompt with its answers: texts, or the messages of `answered` if one of them is no text."""
    texts = {name: row[name] for name in ("prompt", *answers)}
    if not all(isinstance(text, str) for text in texts.values()):
        return answered(row, where, prompt_messages(row["prompt"], where), answers, **others)
    check_columns(row, dict.fromkeys(texts, str), where)
    return texts | others


def pair_after(beginning: Callable[[Row, str], Row]) -> Callable[[Row, str], Row]:
    """Return a conversion of two answers to the messages that another conversion makes."""
    return lambda row, where: answered(row, where, beginning(row, where)["messages"], _SIDES, **_margin(row))


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
    return prompted(row, where, _SIDES, **_margin(row))


def has_implicit_prompt(*sides: Any) -> bool:
    """Return whether both sides are conversations: they begin with a message that is not the assistant's."""
    if not all(isinstance(side, (list, tuple)) and side and isinstance(side[0], Mapping) for side in sides):
        return False
    roles = [side[0].get("role") or side[0].get("from") for side in sides]
    return all(isinstance(role, str) and ROLES.get(role) != "assistant" for role in roles)


def implicit_pair(row: Row, where: str) -> Row:
    """Return the pair of two conversations. Their prompt is their common beginning, and their answers follow it."""
    chosen, rejected = (chat(row[side], where, side) for side in _SIDES)
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if size == 0:
        raise DataError(f"{where}: 'chosen' and 'rejected' begin with different messages; expected the same prompt")
    answers = {"chosen": chosen[size:], "rejected": rejected[size:]}
    for side, answer in answers.items():
        check_answer(answer, f"{where}, from message {size} of both on", side)
    prompt, shared = row.get("prompt"), chosen[:size]
    if prompt not in (None, shared) and all(prompt != message.get("content") for message in shared):
        found = f"'prompt' is {prompt!r:.100}, and 'chosen' and 'rejected' begin with another prompt"
        raise DataError(f"{where}: {found}; the option columns.prompt=null of this data leaves the column out")
    return answered(row | answers, where, shared, _SIDES, **_margin(row))


def labelled(row: Row, where: str) -> Row:
    """Return a prompt or a conversation with an answer that is labelled good or bad."""
    label = row["label"]
    if isinstance(label, str):  # as a CSV file has it
        label = {"true": True, "false": False}.get(label.lower(), label)
    if not isinstance(label, bool):
        raise DataError(f"{where}: 'label' is {label!r:.200}; expected true or false")
    if row.get("messages") is None:
        return prompted(row, where, ["completion"], label=label)
    return answered(row, where, chat(row["messages"], where, "messages"), ["completion"], label=label)


def has_chat(*values: Any) -> bool:
    """Return whether one of the values is messages."""
    return any(isinstance(value, (list, tuple, Mapping)) for value in values)


RowKind = Literal["demonstrations", "preferences", "unpaired", "prompts"]
"""kinds of rows, for: sft; rm and dpo; kto; ppo"""


@dataclass(frozen=True)
class Format:
    """A format of rows."""

    name: str
    """name in the report at the start"""
    needs: str
    """columns that every row has, separated by spaces"""
    convert: Callable[[Row, str], Row] = lambda row, where: row
    """row, name of the row in messages -> the row in rlite's form; raises DataError"""
    reads: str = ""
    """further columns that are read"""
    suits: Callable[..., bool] = lambda *values: True
    """values of the columns that every row has -> whether the row has this format"""

    @property
    def columns(self) -> list[str]:
        """Columns that every row has."""
        return self.needs.split()

    @property
    def known(self) -> list[str]:
        """All columns that are read."""
        return [*self.columns, *self.reads.split()]

    def fits(self, row: Row) -> bool:
        """Return whether a row has this format."""
        values = [row.get(column) for column in self.columns]
        return all(value is not None for value in values) and self.suits(*values)

    def __str__(self) -> str:
        """Return the name and the columns."""
        return f"{self.name} ({', '.join(self.columns)})"


def preferences(
    name: str, before: str, convert: Callable[[Row, str], Row], reads: str, *suits: Callable[..., bool]
) -> Format:
    """Return a format of preferences.

    `before`: column of the conversation before the two answers; "" if they begin with it.
    """
    return Format(f"preferences {name}", f"{before} chosen rejected", convert, f"{reads} margin", *suits)


_ANSWERS = ("response", "completion")
_ALPACA = "input system history"

FORMATS: dict[RowKind, tuple[Format, ...]] = {
    "demonstrations": (
        Format("conversations", "messages", conversation, "tools"),
        Format("ShareGPT conversations", "conversations", sharegpt, "system tools"),
        *(Format(f"chat prompts and {x}s", f"prompt {x}", completed(x), "tools", has_chat) for x in _ANSWERS),
        *(Format(f"raw prompts and {x}s", f"prompt {x}", completed(x)) for x in _ANSWERS),
        Format("Alpaca instructions", "instruction output", alpaca, _ALPACA),
        Format("plain texts", "text", plain_text),
    ),
    "preferences": (
        preferences("between conversations", "", implicit_pair, "prompt tools", has_implicit_prompt),
        preferences("after conversations", "messages", pair_after(conversation), "tools"),
        preferences("after ShareGPT conversations", "conversations", pair_after(sharegpt), "system tools"),
        preferences("after chat prompts", "prompt", prompted_pair, "tools", has_chat),
        Format("raw preferences", "prompt chosen rejected", prompted_pair, "margin"),
        preferences("after Alpaca instructions", "instruction", pair_after(instruction), _ALPACA),
    ),
    "unpaired": (
        Format("labelled completions of conversations", "messages completion label", labelled, "tools"),
        Format("labelled chat completions", "prompt completion label", labelled, "tools", has_chat),
        Format("labelled raw completions", "prompt completion label", labelled),
    ),
    "prompts": (
        Format("conversations", "messages", asked("messages"), "tools"),
        Format("chat prompts", "prompt", asked("prompt"), "tools", has_chat),
        Format("raw prompts", "prompt"),
        Format("tokens", "input_ids"),
        Format("ShareGPT conversations", "conversations", beside(sharegpt, "conversations"), "system"),
        Format("Alpaca instructions", "instruction", beside(instruction), _ALPACA),
    ),
}
"""formats of each kind of rows; a row has the first one that fits"""


def register_format(kind: RowKind, form: Format) -> Format:
    """Register a format of rows of your own, which goes before the others. Call it in a file that `--import` names.

    Args:
        kind: "demonstrations" (sft), "preferences" (rm, dpo), "unpaired" (kto) or "prompts" (ppo).
        form: the format, whose `convert` returns a row of a format that rlite has, such as `messages`.

    Returns:
        The format.

    Raises:
        ConfigError: the kind is unknown, or a format has the name.
    """
    if kind not in FORMATS:
        raise ConfigError(f"register_format({kind!r}): {did_you_mean(kind, FORMATS)}")
    if any(known.name == form.name for known in FORMATS[kind]):
        raise ConfigError(f"register_format: a format of {kind} has the name {form.name!r}; choose another")
    FORMATS[kind] = (form, *FORMATS[kind])
    return form


def known_columns(kind: RowKind) -> set[str]:
    """Return all columns that rows of a kind may have."""
    return {name for entry in FORMATS[kind] for name in entry.known}


def format_of(row: Row, kind: RowKind) -> Format | None:
    """Return the first known format that fits a row; None if there is none."""
    return next((known for known in FORMATS[kind] if known.fits(row)), None)
