"""Results of tools as texts. Sandbox processes load this module: it imports no transformers."""

from __future__ import annotations

import json
from typing import Any

MAX_LENGTH = 8192
"""characters of a result; the rest is left out, and the text says so"""


def result_text(value: Any) -> str:
    """Return a tool's result as the model reads it: a text as it is, else JSON; a long text is cut."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text.encode()
    return f"{text[:MAX_LENGTH]} ... ({len(text) - MAX_LENGTH} characters left out)" if len(text) > MAX_LENGTH else text


def read_text(answer: Any) -> str | None:
    """Return the text that a process has answered; None for any other answer, or a text that was not cut."""
    return answer if isinstance(answer, str) and len(answer) < MAX_LENGTH + 100 else None
