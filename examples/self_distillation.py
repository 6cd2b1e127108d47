"""Contexts for self-distillation: what the student's own weights are shown when they judge an answer as a teacher.

    rlite distill actor.model_name=MODEL train_data.path=prompts.jsonl distill.teacher.weights=average \
        distill.teacher.context=examples/self_distillation.py:demonstration

    rlite grpo actor.model_name=MODEL train_data.path=prompts.jsonl reward.path=my.py:correct \
        distill.teacher.weights=average distill.teacher.context=examples/self_distillation.py:sibling

A function receives the row of the training data, the answer that is judged, and the other answers to the same prompt.
It returns the prompt that the teacher sees, or None if the answer has no teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlite.trainer.rl.distillation import Answer

Messages = list[dict[str, str]]


def demonstration(row: Mapping[str, Any], answer: Answer, siblings: Sequence[Answer]) -> Messages:
    """Show the teacher the answer that the data has, as in SDFT (arXiv:2601.19897)."""
    return shown(row, f"This is an example of a response:\n{row['answer']}\n\nNow answer with a response of your own.")


def sibling(row: Mapping[str, Any], answer: Answer, siblings: Sequence[Answer]) -> Messages | None:
    """Show the teacher the best other answer to the same prompt, if it is better, as in SDPO (arXiv:2601.20802)."""
    best = max(siblings, key=lambda other: other.reward, default=answer)
    if best.reward <= answer.reward:
        return None
    return shown(row, f"A correct answer:\n{best.text}\n\nSolve the task again.")


def feedback(row: Mapping[str, Any], answer: Answer, siblings: Sequence[Answer]) -> Messages:
    """Tell the teacher what the student answered, and whether it was right."""
    verdict = "right" if answer.reward > 0 else f"wrong; the right answer is {row['answer']}"
    return shown(row, f"An earlier answer was:\n{answer.text}\n\nIt was {verdict}. Answer again.")


def shown(row: Mapping[str, Any], told: str) -> Messages:
    """Return the row's messages, the last of which ends with what the teacher is told."""
    *earlier, last = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    return [*earlier, {**last, "content": f"{last['content']}\n\n{told}"}]
