from __future__ import annotations

from typing import Any

import pytest

from rlite.errors import DataError
from rlite.rollout.rewards import gsm8k_reward

SOLUTION = "7 + 13 = <<7+13=20>>20, so she used 7/20 * 120 = <<7/20*120=42>>42\n#### 42"


def score(completions: str, answer: Any = SOLUTION) -> float:
    return gsm8k_reward("", completions, [], [], answer=answer)


@pytest.mark.parametrize(
    "completion", ["#### 42", "so 42.\n####42", "#### $42.00 dollars.", "#### 41, no: #### 42", "a" * 9000 + "#### 42"]
)
def test_the_number_after_the_last_mark_counts(completion: str) -> None:
    assert score(completion) == 1.0


@pytest.mark.parametrize("completion", ["", "42", "#### 41", "####", "#### forty-two", "#### 42 #### 41", "#### -42"])
def test_anything_else_is_false(completion: str) -> None:
    assert score(completion) == 0.0


@pytest.mark.parametrize(
    ("answer", "completion"), [(1234, "#### 1,234"), ("#### 1,000,000", "#### $1000000"), ("-0.5", "#### -.5")]
)
def test_numbers_are_compared_by_value(answer: Any, completion: str) -> None:
    assert score(completion, answer) == 1.0


@pytest.mark.parametrize("answer", ["", "#### none", None])
def test_an_answer_of_the_data_without_a_number_is_not_a_zero(answer: Any) -> None:
    with pytest.raises(DataError, match="expected a number"):
        score("#### 1", answer)


@pytest.mark.parametrize(
    "number",
    [
        *("+1234.5", "**1234.5**", "*1,234.5*", "__1234.5__", "`1234.5`", "**+1,234.50**.", " € 1,234.5", "\\$1,234.5"),
        *(
            "\\boxed{1234.5}",
            "$\\boxed{1{,}234.5}$",
            "\\(1\\,234.5\\)",
            "\\text{1234.5}",
            "£1234.5 in all",
            "$ 1234.5$",
        ),
        *("１２３４.5", "１，２３４．５", "1\u202f234.5", "1\u00a0234.5", "\u00a01234.5", "1234.50000"),
    ],
)
def test_markup_and_notation_of_a_number_do_not_count(number: str) -> None:
    for sign, answer in (("", "1234.5"), ("-", "-1234.5"), ("\u2212", "-1234.5"), ("\uff0d", "-1234.5")):
        if sign and "+" in number:
            continue
        assert score(f"####{sign}{number}", answer) == 1.0
        assert score(f"#### {sign}{number}", "1234") == 0.0


@pytest.mark.parametrize("text", ["½", "x42", "forty-two **42**", "- - 42", "()", " " * 3000])
def test_markup_alone_is_no_number(text: str) -> None:
    assert score(f"#### {text}") == 0.0
