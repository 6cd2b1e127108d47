"""Convert results of reward functions to numbers. Sandbox processes load this module: it imports no torch.

A score is the reply of a reward process: a finite number, a list [total, parts] for a sum of several rewards, or a
text. The text says why the result is not a reward. A number with an answer is a mapping {"score", "answer"}: a function
returns one to name the answer that it has judged, for example `{"score": 1.0, "answer": "42"}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlite.runtime.sandbox.child import MAX_TEXT, printable

Score = float | str | list[Any] | dict[str, Any]
ANSWER_KEYS = ("answer", "pred")
"""keys of the answer in a function's result; the second is verl's"""
MAX_ANSWER = 1000
"""characters of an answer that are kept"""


class Unusable(NamedTuple):
    """A result that is not a reward, with the reason."""

    why: str


class Sum(NamedTuple):
    """A result that is the weighted sum of several rewards."""

    total: Any
    parts: list[Any]
    """each before its weight; None does not count"""


class Reward(float):
    """A reward with its parts by name, if it is a weighted sum, and with the answer that the function has named."""

    parts: Mapping[str, float] = {}
    """each before its weight; NaN does not count"""
    answer: str | None = None
    """answer in the completion, such as its number; equal answers have equal texts"""


def answered(score: float, answer: str | None) -> Reward:
    """Return a reward that names the answer that it has judged.

    `answer`: what the completion answers; None if nothing is found.
    """
    reward = Reward(score)
    reward.answer = answer
    return reward


def score(value: Any) -> Score:
    """Return the score of a function's result."""
    if isinstance(value, Unusable):
        return value.why
    if isinstance(value, Sum):
        total = score(value.total)
        return total if isinstance(total, str) else [total, [as_number(part) for part in value.parts]]
    if isinstance(value, Reward) and value.answer is not None:
        value = {"score": float(value), "answer": value.answer}
    if type(value) is dict and (number := as_number(value.get("score"))) is not None:
        found = next((value[key] for key in ANSWER_KEYS if value.get(key) is not None), None)
        text = found if isinstance(found, str) else text_of_value(found)
        return number if found is None else {"score": number, "answer": text[:MAX_ANSWER]}
    number = as_number(value)
    return number if number is not None else text_of_value(value)


def read_score(answer: Any, names: Sequence[str] = ()) -> float | str | None:
    """Return the reward in an answer, or the text that says why there is none; None for any other answer."""
    match answer:
        case str():
            return printable(answer)
        case int() | float() if not names:
            return as_number(answer)
        case {"score": int() | float() as number, "answer": str() as found} if not names and len(answer) == 2:
            value = as_number(number)
            return None if value is None else answered(value, printable(found[:MAX_ANSWER]))
        case [int() | float() as number, [*parts]] if len(parts) == len(names) and as_number(number) is not None:
            numbers = [math.nan if part is None else as_number(part) for part in parts]
            reward = Reward(number)
            reward.parts = {name: part for name, part in zip(names, numbers, strict=True) if part is not None}
            return reward if names and len(reward.parts) == len(names) else None
    return None


def as_number(value: Any) -> float | None:
    """Return a finite float from a number, or from a tensor or array of one element; None for anything else."""
    try:
        if hasattr(value, "item") and getattr(value, "size", 1) != 0:
            value = value.item()
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except Exception:  # several elements, an integer that no float holds, or a class of the function's own
        return None
    return number if math.isfinite(number) else None


def text_of_value(value: Any) -> str:
    """Return a value as a short text."""
    try:
        return repr(value)[:MAX_TEXT]
    except Exception:  # a class of the function's own
        return f"a {type(value).__name__}"
