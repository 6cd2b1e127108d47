"""Probe of a chat template: write a call of a tool, and find the format that reads it back."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from transformers.utils import get_json_schema

from rlite.data.chat.raw import raw_tokens
from rlite.data.chat.template import ChatTemplate, TemplateRefusal, has_chat_template
from rlite.data.chat.turns import without_end
from rlite.errors import ConfigError, did_you_mean
from rlite.rollout.tools.formats import FORMATS, ToolCall, ToolCallFormat, numbered, typed
from rlite.rollout.tools.response_template import template_format


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
