"""Problems from reasoning-gym as rows.

A row is plain data: it can be written to JSONL, sent to another process, and scored there. The rewards are in
`rlite.rollout.rewards.reasoning`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from rlite.errors import ConfigError, DataError, did_you_mean

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of cellpylib, if pip has not compiled it
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
    draws = size * ATTEMPTS_PER_PROBLEM
    dataset = make_task(name, seed=seed, size=draws, **options)
    seen = {question.casefold() for question in exclude}
    rows: list[Row] = []
    for problem in map(dataset.__getitem__, range(draws)):
        question = problem["question"]
        if question.casefold() not in seen:
            seen.add(question.casefold())
            messages = [{"role": "user", "content": question}]
            rows.append({"messages": messages, "answer": problem["answer"], "metadata": problem["metadata"]})
        if len(rows) == size:
            break
    if len(rows) < size:
        gave = f"{name} gave {len(rows)} distinct problems in {draws} draws, but {size} were asked for"
        raise DataError(f"{gave}; ask for fewer, or widen its options")
    return rows


def held_out_split(
    name: str, num_train: int, num_held_out: int, seed: int, **options: Any
) -> tuple[list[Row], list[Row]]:
    """Make training and held-out problems of a task. No question occurs twice.

    Held-out problems are drawn first, so they stay the same when `num_train` changes. Errors are those of
    `build_problems`.

    Returns training rows and held-out rows.
    """
    rows = build_problems(name, num_held_out + num_train, seed, **options)
    return rows[num_held_out:], rows[:num_held_out]


def question_of(row: Mapping[str, Any]) -> str:
    """Return the text of a row's question."""
    return row["messages"][-1]["content"]


def make_task(name: str, **options: Any) -> Any:
    """Return a task of reasoning-gym: its problems, and their verifier."""
    if reasoning_gym is None:
        raise ConfigError("reasoning-gym is not installed; run: pip install 'rlite[quickstart]'")
    if name not in DATASETS:
        raise ConfigError(f"reasoning-gym has no task {name!r}; {did_you_mean(name, DATASETS)}")
    try:
        return reasoning_gym.create_dataset(name, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning-gym's task {name!r} refuses {options}: {error}") from error
