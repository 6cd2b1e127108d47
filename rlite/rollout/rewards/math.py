"""Reward mathematical answers, which math-verify compares by their meaning."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rlite.errors import ConfigError, DataError
from rlite.rollout.rewards.score import Reward, answered

try:
    import math_verify
    import sympy
except ImportError:
    math_verify = None

MAX_CHARACTERS = 2000
"""characters read at the end of a completion, because the search for an answer takes quadratic time"""


def math_verify_reward(
    prompt: Any, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], *, answer: Any, **data: Any
) -> Reward:
    r"""Return 1.0 if the completion ends with an answer equal to `answer`, else 0.0.

    Answers are numbers or LaTeX, bare, within dollars or in \boxed{}: 1/2, 0.5 and $\frac{2}{4}$ are equal. The reward
    names a decimal number or a quotient as a fraction in lowest terms, any other answer as sympy writes it.

    Run this function in a process: math-verify's own time-outs need a main thread and are off. The
    time-out of RewardFunction holds.

    Args:
        prompt: not read.
        completions: the text of the completion.
        prompt_ids: not read.
        completion_ids: not read.
        answer: the row's correct answer.
        data: the row's other columns, not read.

    Raises:
        ConfigError: math-verify is missing.
        DataError: `answer` itself cannot be understood.
    """
    if math_verify is None:
        raise ConfigError("math-verify is not installed; run: pip install 'rlite[math]'")
    text = str(answer)
    expected = _parse(text if "$" in text or r"\boxed" in text else rf"\boxed{{{text}}}")
    if not expected:
        raise DataError(f"answer={answer!r}: math-verify finds no mathematical expression in it")
    found = _parse(completions[-MAX_CHARACTERS:])
    is_equal = math_verify.verify(expected, found, timeout_seconds=None)
    return answered(float(is_equal), _text_of(found[0]) if found else None)


def _text_of(value: Any) -> str:
    """Return the text of an answer, the same for a decimal number and for a fraction that is equal to it."""
    if isinstance(value, sympy.Float):
        return str(sympy.Rational(str(value)))
    if isinstance(value, sympy.Mul):  # math-verify keeps 2/4 as 2 * 4**-1
        numerator, denominator = value.as_numer_denom()
        if numerator.is_Integer and denominator.is_Integer:
            return str(sympy.Rational(numerator, denominator))
    return str(value)


def _parse(text: str) -> Any:
    return math_verify.parse(text, parsing_timeout=None)


# they warn that their time-outs are off
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)
