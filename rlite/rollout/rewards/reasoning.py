"""Reward answers to reasoning-gym's problems, by the task's own verifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlite.data.reasoning import verify

MAX_CHARACTERS = 20_000
"""characters of an answer that are read; the tasks' answers are far shorter"""


def reasoning_gym_reward(
    prompt: Any, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
) -> float:
    """Return the task's `score_answer`, in [0, 1], for the last <answer>...</answer>.

    Without this tag, the whole completion is the answer.

    Args:
        prompt: passed to the verifier.
        completions: text of the completion.
        prompt_ids: not read.
        completion_ids: not read.
        **data: the row's other columns, as made by `rlite.data.reasoning.build_problems`.

    Raises:
        ConfigError: reasoning-gym is missing.
    """
    answer = completions.rpartition("<answer>")[2].partition("</answer>")[0]
    return verify(prompt, answer[:MAX_CHARACTERS], prompt_ids, completion_ids, **data)
