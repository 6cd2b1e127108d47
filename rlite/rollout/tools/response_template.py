"""Calls as a tokenizer's own response template reads them, in a sandbox process: no torch here."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers.utils.chat_parsing import parse_response

from rlite.rollout.tools import formats
from rlite.runtime.sandbox.calls import SandboxError
from rlite.runtime.sandbox.function import SandboxFunction

logger = logging.getLogger(__name__)
NOTHING = "(?!)"
"""pattern that matches nowhere"""
PARSE_TIMEOUT = 10.0
"""seconds in which the template's patterns have to read an answer"""


def template_format(tokenizer: Any, prompt: str) -> formats.ToolCallFormat:
    """Return the format of a tokenizer's own response template."""
    field = tokenizer.response_template.get("fields", {}).get("tool_calls", {})
    opened = field.get("open", ())
    marks = (opened,) if isinstance(opened, str) else tuple(opened)
    pattern = "|".join(map(re.escape, marks)) or field.get("open_pattern") or NOTHING
    read = partial(formats.parsed, partial(read_answer, tokenizer.response_template, pattern, prompt))
    function = SandboxFunction(read, PARSE_TIMEOUT, what="the tokenizer's response template", finish=json.dumps)

    async def aside(text: str) -> formats.Reading:
        try:
            content, calls, malformed = json.loads(await function.ask(str, text=text))
        except SandboxError as error:
            logger.warning("%s; no call is read from %.80r", error, text)
            return text, [], []
        return content, [formats.ToolCall(*call) for call in calls], malformed

    num_settled = formats.settled_before(*marks) if marks else lambda text: 0
    return formats.ToolCallFormat("response_template", lambda text: read(text)[:2], num_settled, True, aside=aside)


def read_answer(template: Mapping[str, Any], pattern: str, prompt: str, text: str) -> formats.Reading:
    """Return what an answer holds. If a call cannot be read, each call is read by itself."""

    def calls_of(text: str, prompt: str = "") -> list[formats.ToolCall] | None:
        try:
            message = parse_response(text, template, prefix=prompt)
            return [formats.read_call(call["function"]) for call in message.get("tool_calls") or ()]
        except formats.UNREADABLE:
            return None

    def read_block(found: re.Match[str]) -> tuple[formats.Pieces, int]:
        following = re.compile(pattern, re.DOTALL).search(found.string, max(found.end(), found.start() + 1))
        end = len(found.string) if following is None else following.start()
        piece = found.string[found.start() : end]
        calls = calls_of(piece) or [] if whole is None else []
        return (calls, [piece] if whole is None and not calls else []), end

    whole, opening = calls_of(text, prompt), formats.opened_thought(prompt)
    content, calls, malformed = formats.scanned(opening + text, pattern, read_block)
    return content.removeprefix(opening), calls if whole is None else whole, malformed
