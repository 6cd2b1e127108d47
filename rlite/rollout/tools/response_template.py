"""Tool calls by a tokenizer's own response template, whose patterns run in a process with a deadline."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers.utils.chat_parsing import parse_response

from rlite.rollout.tools.formats import UNREADABLE, Reading, ToolCall, ToolCallFormat, num_before, parsed, read_call
from rlite.sandbox.errors import SandboxError
from rlite.sandbox.function import SandboxFunction

logger = logging.getLogger(__name__)
PARSE_TIMEOUT = 10.0
"""seconds in which the template's patterns have to read an answer"""


def template_format(tokenizer: Any, prompt: str) -> ToolCallFormat:
    """Return the format of a tokenizer's own response template.

    Args:
        tokenizer: with a `response_template`.
        prompt: the end of it is what the chat template opens an answer with.
    """
    template = tokenizer.response_template
    field = template.get("fields", {}).get("tool_calls", {})
    opened = field.get("open", ())
    marks = (opened,) if isinstance(opened, str) else tuple(opened)
    pattern = "|".join(map(re.escape, marks)) if marks else field.get("open_pattern", "")
    read = partial(read_answer, template=template, pattern=pattern, prompt=prompt)
    function = SandboxFunction(partial(as_json, read), PARSE_TIMEOUT, what="the tokenizer's response template")

    async def aside(text: str) -> Reading:
        try:
            content, calls, malformed = json.loads(await function.ask(str, text=text))
        except SandboxError as error:
            logger.warning("%s; no call is read from %.80r", error, text)
            return text, [], []
        return content, [ToolCall(*call) for call in calls], malformed

    def num_settled(text: str) -> int:
        return len(text[: num_before(text, marks)].rstrip()) if marks else 0

    parse = partial(parsed, lambda text: read(text=text))
    return ToolCallFormat("response_template", lambda text: parse(text)[:2], num_settled, True, aside=aside)


def as_json(read: Any, text: str) -> str:
    """Return what `read` finds in a text, as JSON."""
    content, calls, malformed = parsed(lambda text: read(text=text), text)
    return json.dumps([content, [[call.name, call.arguments] for call in calls], malformed])


def read_answer(text: str, template: Mapping[str, Any], pattern: str, prompt: str) -> Reading:
    """Return what an answer holds. If a call cannot be read, each call is read by itself.

    Args:
        text: the answer.
        template: the response template.
        pattern: matches the beginning of a call.
        prompt: text before the answer.
    """
    starts = [found.start() for found in re.finditer(pattern, text, re.DOTALL)] or [len(text)]
    content = text[: starts[0]].rstrip()
    try:
        return content, _calls(text, template, prompt), []
    except UNREADABLE:
        pieces = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for piece in pieces:
        try:
            calls += _calls(piece, template, prompt)
        except UNREADABLE:
            malformed.append(piece)
    return "".join([content, *malformed]), calls, malformed


def _calls(text: str, template: Mapping[str, Any], prompt: str) -> list[ToolCall]:
    message = parse_response(text, template, prefix=prompt)
    return [read_call(call["function"], "arguments") for call in message.get("tool_calls") or ()]
