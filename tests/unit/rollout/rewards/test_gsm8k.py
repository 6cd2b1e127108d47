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
