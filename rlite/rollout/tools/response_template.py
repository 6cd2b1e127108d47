"""Tool calls by a tokenizer's own response template, whose patterns run in a process with a deadline.

Probe of a chat template: write a call of a tool, and find the format that reads it back.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_parsing import parse_response

from rlite.data.chat.answers import without_end
from rlite.data.chat.template import ChatTemplate, TemplateRefusal, has_chat_template
from rlite.data.prompts import raw_tokens
from rlite.errors import ConfigError, did_you_mean
from rlite.rollout.tools.formats import (
    FORMATS,
    UNREADABLE,
    Pieces,
    Reading,
    ToolCall,
    ToolCallFormat,
    numbered,
    opened_thought,
    parsed,
    read_call,
    scanned,
    settled_before,
    typed,
)
from rlite.runtime.sandbox.calls import SandboxError
from rlite.runtime.sandbox.function import SandboxFunction

logger = logging.getLogger(__name__)
NOTHING = "(?!)"
"""pattern that matches nowhere"""
PARSE_TIMEOUT = 10.0
"""seconds in which the template's patterns have to read an answer"""


def template_format(tokenizer: Any, prompt: str) -> ToolCallFormat:
    """Return the format of a tokenizer's own response template.

    Args:
        tokenizer: with a `response_template`.
        prompt: the end of it is what the chat template opens an answer with.
    """
    field = tokenizer.response_template.get("fields", {}).get("tool_calls", {})
    opened = field.get("open", ())
    marks = (opened,) if isinstance(opened, str) else tuple(opened)
    pattern = "|".join(map(re.escape, marks)) or field.get("open_pattern") or NOTHING
    read = partial(parsed, partial(read_answer, tokenizer.response_template, pattern, prompt))
    function = SandboxFunction(read, PARSE_TIMEOUT, what="the tokenizer's response template", finish=json.dumps)

    async def aside(text: str) -> Reading:
        try:
            content, calls, malformed = json.loads(await function.ask(str, text=text))
        except SandboxError as error:
            logger.warning("%s; no call is read from %.80r", error, text)
            return text, [], []
        return content, [ToolCall(*call) for call in calls], malformed

    num_settled = settled_before(*marks) if marks else lambda text: 0
    return ToolCallFormat("response_template", lambda text: read(text)[:2], num_settled, True, aside=aside)


def read_answer(template: Mapping[str, Any], pattern: str, prompt: str, text: str) -> Reading:
    """Return what an answer holds. If a call cannot be read, each call is read by itself.

    Args:
        template: the response template.
        pattern: matches the beginning of a call.
        prompt: text before the answer.
        text: the answer.
    """

    def calls_of(text: str, prompt: str = "") -> list[ToolCall] | None:
        try:
            message = parse_response(text, template, prefix=prompt)
            return [read_call(call["function"]) for call in message.get("tool_calls") or ()]
        except UNREADABLE:
            return None

    def read_block(found: re.Match[str]) -> tuple[Pieces, int]:
        following = re.compile(pattern, re.DOTALL).search(found.string, max(found.end(), found.start() + 1))
        end = len(found.string) if following is None else following.start()
        piece = found.string[found.start() : end]
        calls = calls_of(piece) or [] if whole is None else []
        return (calls, [piece] if whole is None and not calls else []), end

    whole, opening = calls_of(text, prompt), opened_thought(prompt)
    content, calls, malformed = scanned(opening + text, pattern, read_block)
    return content.removeprefix(opening), calls if whole is None else whole, malformed


def find_probe_record(text: str, count: int) -> None:
    """Find a record.

    Args:
        text: what to find
        count: how many
    """


PROBE = ToolCall(find_probe_record.__name__, {"text": "red apple", "count": 3})
TOOL = get_json_schema(find_probe_record)


def tool_call_format(
    form: str | ToolCallFormat | None, tokenizer: Any, chat_template_options: Mapping[str, Any] | None = None
) -> ToolCallFormat:
    """Return the format in which calls are read.

    Args:
        form: a ToolCallFormat, which is taken as it is; the name of one; or None for the format that the tokenizer's
            response template or chat template has. For a template that writes no calls, the format is hermes.
        tokenizer: the model's tokenizer.
        chat_template_options: further keyword arguments for `apply_chat_template`.

    Raises:
        ConfigError: the name is unknown, or the chat template writes a call that the format does not read back.
    """
    if isinstance(form, ToolCallFormat):
        return form
    if form is not None and (not isinstance(form, str) or form not in FORMATS):
        raise ConfigError(f"tool call format {form!r}: {did_you_mean(str(form), FORMATS)}")
    prompt, written = _write_probe(tokenizer, chat_template_options or {})
    if form is not None:
        candidates = [FORMATS[form]]
    elif getattr(tokenizer, "response_template", None) is not None:
        candidates = [template_format(tokenizer, prompt)]
    else:
        candidates = list(FORMATS.values())
    if not written:
        return candidates[0]
    for candidate in candidates:
        if _reads(candidate, tokenizer, written):
            return candidate
    names = ", ".join(candidate.name for candidate in candidates)
    raise ConfigError(
        f"the model's chat template writes a call of a tool as {tokenizer.decode(written)!r}, which cannot be read "
        f"back (tried: {names}): give tool_format=, a name ({', '.join(FORMATS)}) or a ToolCallFormat of your own"
    )


def _write_probe(tokenizer: Any, options: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Return a prompt and the tokens of an answer that calls a tool; no tokens if the template writes no calls."""
    if not has_chat_template(tokenizer):
        return "", []
    template = ChatTemplate(tokenizer, {**options, "tools": [TOOL]})
    answer = {"role": "assistant", "content": "", "tool_calls": numbered([PROBE], itertools.count(1))}
    try:
        prompt, written = template.written(answer)
    except TemplateRefusal:
        return "", []
    if template.ending is not None:  # the end of an answer need not be a special token
        written = written.removesuffix(template.ending.tail).removesuffix(template.ending.closing)
    return prompt, raw_tokens(tokenizer, [written])[0] if PROBE.name in written else []


def _reads(form: ToolCallFormat, tokenizer: Any, written: list[int]) -> bool:
    """Return whether the format finds the probe in the template's tokens, decoded like an answer of the model."""
    text = form.text(tokenizer, without_end(tokenizer, written))
    return typed(form.parse(text)[1], [TOOL]) == [PROBE]
