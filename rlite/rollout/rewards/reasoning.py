"""Rewards for answers to reasoning-gym's problems, by the task's own verifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlite.data.reasoning import verify

MAX_CHARACTERS = 20_000
"""of an answer that are read; those of the tasks are far shorter"""


def reasoning_gym_reward(
    prompt: Any, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
) -> float:
    """Return the task's `score_answer`, in [0, 1], of the last <answer>...</answer>, or of all the text without one.

    Args:
        prompt: passed to the verifier.
        completions: the text of the completion.
        prompt_ids: not read.
        completion_ids: not read.
        data: the row's other columns, as `rlite.data.reasoning.build_problems` makes them.

    Raises:
        ConfigError: reasoning-gym is missing.
    """
    answer = completions.rpartition("<answer>")[2].partition("</answer>")[0]
    return verify(prompt, answer[:MAX_CHARACTERS], prompt_ids, completion_ids, **data)
