"""Problems from reasoning-gym as rows, and its own verifiers as reward functions.

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
    """`size` distinct problems of a reasoning-gym task, the same ones for the same arguments.

    Args:
        name: a task of reasoning-gym, such as "spell_backward".
        size: how many rows.
        seed: problem i is made from seed + i; repeated problems are passed over.
        exclude: questions (see `question_of`) that must not occur.
        options: fields of the task's own config, such as max_word_len.

    Returns: rows of `messages` (one user turn: the question), `answer` (reasoning-gym's solution; other answers may
    verify too) and `metadata` (what the verifier needs; `metadata["source_dataset"]` is `name`). Questions that differ
    in case alone count as one.

    Raises: ConfigError if reasoning-gym is missing, or does not know the task or an option; DataError if the task has
    fewer distinct problems than asked for.
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
    """Training and held-out problems of a task: no question occurs twice, neither in a part nor across them.

    The held-out problems are drawn first, so that they stay the same when `num_train` changes. Returns and raises as
    `build_problems`.
    """
    rows = build_problems(name, num_held_out + num_train, seed, **options)
    return rows[num_held_out:], rows[:num_held_out]


def question_of(row: Mapping[str, Any]) -> str:
    """The text of a row's question."""
    return row["messages"][-1]["content"]


def verify(
    prompt: Any, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
) -> float:
    """A reward function: reasoning-gym's score of a completion, in [0, 1] and with the task's own partial credit.

    `completions` is the text of one completion without special tokens; surrounding white space does not count. `data`
    is the row; the other arguments are not read.
    """
    entry = {"question": question_of(data), "answer": data["answer"], "metadata": data["metadata"]}
    score = _verifier(data["metadata"]["source_dataset"])(completions.strip(), entry)
    return float(score)


def verify_exactly(
    prompt: Any, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
) -> float:
    """A reward function: 1.0 if reasoning-gym's score is full, else 0.0. Arguments as for `verify`.

    Full means equal to 1: partial credits are sums of fractions, which can end a rounding error above or below.
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
