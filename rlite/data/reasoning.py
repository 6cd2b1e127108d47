"""Problems from reasoning-gym as rows, and its verifiers as reward functions.

A row is plain data: it can be written to JSONL, sent to another process, and scored there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from rlite.errors import ConfigError, DataError, did_you_mean

try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
except ImportError:
    reasoning_gym = None

ATTEMPTS_PER_PROBLEM = 50
"""a task may repeat itself, or repeat what is excluded, so often before it counts as exhausted"""

Row = dict[str, Any]


def build_problems(name: str, size: int, seed: int, *, exclude: Iterable[str] = (), **options: Any) -> list[Row]:
    """Make distinct problems of a reasoning-gym task, the same for the same arguments.

    Args:
        name: a task of reasoning-gym, such as "spell_backward".
        size: number of rows.
        seed: problem i is made from seed + i; repeated problems are skipped.
        exclude: questions (see `question_of`) that must not occur.
        **options: fields of the task's own config, such as max_word_len.

    Returns:
        Rows of `messages` (one user turn: the question), `answer` (reasoning-gym's solution; other answers may verify,
            too) and `metadata` (for the verifier; `metadata["source_dataset"]` is `name`). Questions that differ only
            in case count as one.

    Raises:
        ConfigError: reasoning-gym is missing, or does not know the task or an option.
        DataError: the task has fewer distinct problems.
    """
    dataset = _dataset(name, seed=seed, size=size * ATTEMPTS_PER_PROBLEM, **options)
    seen = {question.casefold() for question in exclude}
    rows: list[Row] = []
    for index in range(size * ATTEMPTS_PER_PROBLEM):
        if len(rows) == size:
            break
        problem = dataset[index]
        question = problem["question"]
        if question.casefold() not in seen:
            seen.add(question.casefold())
            messages = [{"role": "user", "content": question}]
            rows.append({"messages": messages, "answer": problem["answer"], "metadata": problem["metadata"]})
    if len(rows) < size:
        raise DataError(
            f"{name} gave {len(rows)} distinct problems in {size * ATTEMPTS_PER_PROBLEM} draws, but {size} were asked "
            "for; ask for fewer, or widen its options"
        )
    return rows


def held_out_split(
    name: str, num_train: int, num_held_out: int, seed: int, **options: Any
) -> tuple[list[Row], list[Row]]:
    """Make training and held-out problems of a task. No question occurs twice.

    Held-out problems are drawn first, so they stay the same when `num_train` changes. Errors are those of
    `build_problems`.

    Args:
        name: a task of reasoning-gym.
        num_train: number of training rows.
        num_held_out: number of held-out rows.
        seed: seed of the problems.
        **options: fields of the task's own config.

    Returns:
        Training rows and held-out rows.
    """
    rows = build_problems(name, num_held_out + num_train, seed, **options)
    return rows[num_held_out:], rows[:num_held_out]


def question_of(row: Mapping[str, Any]) -> str:
    """Return the text of a row's question."""
    return row["messages"][-1]["content"]


def verify(
    prompt: Any, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
) -> float:
    """Score a completion: a reward function with reasoning-gym's score in [0, 1], including the task's partial credit.

    Args:
        prompt: not read.
        completions: text of one completion without special tokens; surrounding white space does not count.
        prompt_ids: not read.
        completion_ids: not read.
        **data: the row.

    Returns:
        The score.
    """
    entry = {"question": question_of(data), "answer": data["answer"], "metadata": data["metadata"]}
    score = _verifier(data["metadata"]["source_dataset"])(completions.strip(), entry)
    return float(score)


def verify_exactly(
    prompt: Any, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
) -> float:
    """Score a completion: a reward function that gives 1.0 for reasoning-gym's full score, else 0.0.

    The full score is exactly 1. Partial credits are sums of fractions, which can end a rounding error above or below.

    Args:
        prompt: not read.
        completions: text of one completion without special tokens.
        prompt_ids: not read.
        completion_ids: not read.
        **data: the row.

    Returns:
        The score.
    """
    return float(verify(prompt, completions, prompt_ids, completion_ids, **data) == 1.0)


def _dataset(name: str, **options: Any) -> Any:
    if reasoning_gym is None:
        raise ConfigError("reasoning-gym is not installed; run: pip install 'rlite[quickstart]'")
    if name not in DATASETS:
        raise ConfigError(f"reasoning-gym has no task {name!r}; {did_you_mean(name, DATASETS)}")
    try:
        return reasoning_gym.create_dataset(name, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning-gym's task {name!r} refuses {options}: {error}") from error


@cache
def _verifier(name: str) -> Callable[[str, dict[str, Any]], float]:
    # Reading a task's word list takes longer than thousands of its scores; the row says all else that scoring needs.
    return _dataset(name, seed=0).score_answer
