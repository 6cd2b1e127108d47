"""Reward answers to GSM8K and similar tasks: the number after `####`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from rlite.errors import DataError
from rlite.rollout.rewards.score import Reward, answered

MAX_CHARACTERS = 2000
"""characters read at the end of a completion"""
_MARKUP = r"(?:\\(?:boxed|textbf|mathbf|text|[$(\[])|[\s*_`${€£¥₹])*"
"""currency, emphasis and LaTeX before a number"""
NUMBER = re.compile(rf"{_MARKUP}(?:([+-]){_MARKUP})?(\d[\d,]*(?:\.\d+)?|\.\d+)")
_THOUSANDS = re.compile(r"(?<=\d)(?:[\u00a0\u2009\u202f]|\{,\}|\\,)(?=\d)")
_PLAIN = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | dict.fromkeys(map(ord, "\u2212\u2010\u2013"), "-")
"""full-width characters, and the signs that people write for a minus"""


def gsm8k_reward(
    prompt: Any, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, answer: Any, **data: Any
) -> Reward:
    """Return 1.0 if the number after the completion's last `####` is that of `answer`, else 0.0.

    Thousands separators, currency, emphasis, LaTeX's markup and what follows the number do not count: `#### $1,000.`
    and `#### **1000**` are 1000. A minus and digits may be any of Unicode's. The reward names the number, from which
    evaluations compute majority@k.

    Args:
        prompt: not read.
        completions: the text of the completion.
        prompt_ids: not read.
        completion_ids: not read.
        answer: the row's answer: a number, or GSM8K's solution, which ends with `#### 42`.
        data: the row's other columns, not read.

    Raises:
        DataError: `answer` holds no number.
    """
    text = str(answer)
    expected = _number(text.rpartition("####")[2])
    if expected is None:
        raise DataError(f"answer={text[-100:]!r}: expected a number, or a solution that ends with one after ####")
    _, mark, found = completions[-MAX_CHARACTERS:].rpartition("####")
    number = _number(found) if mark else None
    return answered(float(number == expected), None if number is None else f"{number.normalize():f}")


def _number(text: str) -> Decimal | None:
    match = NUMBER.match(_THOUSANDS.sub(",", text.translate(_PLAIN)))
    return None if match is None else Decimal((match[1] or "") + match[2].replace(",", ""))
