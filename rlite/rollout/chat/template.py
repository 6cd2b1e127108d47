"""What a chat template makes of a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlite.errors import RliteError
from rlite.rollout.workflow import Tokenizer

Message = Mapping[str, Any]


def render(tokenizer: Tokenizer, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    """The text of a conversation. Raises: TemplateRefusal if the template does not take it."""
    try:
        try:
            return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        except TypeError:  # there are templates (DeepSeek's) that take the arguments of calls as JSON text
            told = [_with_json_arguments(message) for message in messages]
            return tokenizer.apply_chat_template(told, tokenize=False, **options)
    except Exception as error:  # a template is a program of others: it may fail in any way on what it is given
        roles = ", ".join(message["role"] for message in messages)
        raise TemplateRefusal(
            f"the model's chat template refuses a conversation of the roles {roles}: {error or type(error).__name__}"
        ) from error


class TemplateRefusal(RliteError):
    """A chat template does not take a conversation."""


def _with_json_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [f["arguments"] if isinstance(f["arguments"], str) else json.dumps(f["arguments"]) for f in functions]
    calls = [
        {**call, "function": {**call["function"], "arguments": text}}
        for call, text in zip(message["tool_calls"], texts, strict=True)
    ]
    return {**message, "tool_calls": calls}
