"""Reward answers to reasoning-gym's problems, by the task's own verifier.

The rows are those of `rlite.data.reasoning.build_problems`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from rlite.data.reasoning import make_task, question_of

MAX_CHARACTERS = 20_000
"""characters of an answer that are read; the tasks' answers are far shorter"""


def reasoning_gym_reward(
    prompt: Any, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
) -> float:
    """Return the task's `score_answer`, in [0, 1], for the last <answer>...</answer>.

    Without this tag, the whole completion is the answer. The score includes the task's partial credit.

    Args:
        prompt: not read.
        completions: text of the completion.
        prompt_ids: not read.
        completion_ids: not read.
        **data: the row.

    Raises:
        ConfigError: reasoning-gym is missing.
    """
    answer = completions.rpartition("<answer>")[2].partition("</answer>")[0]
    return _score(answer[:MAX_CHARACTERS], data)


def verify_exactly(
    prompt: Any, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
) -> float:
    """Return 1.0 if the whole completion has the task's full score, else 0.0.

    The full score is exactly 1. Partial credits are sums of fractions, which can end a rounding error above or below.
    A completion of more than `MAX_CHARACTERS` has no full score.

    Args:
        prompt: not read.
        completions: text of the completion, without special tokens.
        prompt_ids: not read.
        completion_ids: not read.
        **data: the row.

    Raises:
        ConfigError: reasoning-gym is missing.
    """
    return float(len(completions) <= MAX_CHARACTERS and _score(completions, data) == 1.0)


def _score(answer: str, row: Mapping[str, Any]) -> float:
    entry = {"question": question_of(row), "answer": row["answer"], "metadata": row["metadata"]}
    return float(_verifier(row["metadata"]["source_dataset"])(answer.strip(), entry))


@cache
def _verifier(name: str) -> Callable[[str, dict[str, Any]], float]:
    # reading a task's word list takes longer than thousands of its scores; the row says all else that scoring needs
    return make_task(name, seed=0).score_answer
