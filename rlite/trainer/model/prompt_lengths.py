"""Lengths of prompts in tokens, and the context length of a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlite.data.rows import place_of
from rlite.data.tokens import beyond_vocabulary
from rlite.errors import DataError
from rlite.nn.pretrained import load_config
from rlite.rollout import RolloutWorkflow

Rows = Sequence[Mapping[str, Any]]


def longest_prompt(
    rows: Rows,
    workflow: RolloutWorkflow,
    max_length: int,
    where: str,
    limits: str,
    read: Callable[[Rows], Iterable[Mapping[str, Any]]] = iter,
    vocab_size: int = sys.maxsize,
) -> int:
    """Return the length of the longest prompt in tokens; 0 if the workflow does not know the prompts beforehand."""
    longest = 0
    for number, row in enumerate(read(rows)):
        try:
            ids = workflow.opening(row) or ()
            check_ids(ids, vocab_size)
            if len(ids) >= max_length:
                room = f"which leaves no room for an answer in {max_length} {limits}"
                raise DataError(f"its prompt has {len(ids)} tokens, {room}")
        except DataError as error:
            raise DataError(f"{place_of(rows, number, where)}: {error}") from error
        longest = max(longest, len(ids))
    return longest


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Check that a prompt's tokens are in the model's vocabulary."""
    if ids and max(ids) >= vocab_size:
        raise DataError(f"the prompt holds {beyond_vocabulary(max(ids), vocab_size)}")


def vocab_size_of(name: str) -> int:
    """Return the size of a checkpoint's vocabulary."""
    return load_config(name).get_text_config().vocab_size


def model_limit(name: str) -> int | None:
    """Return the longest sequence of a checkpoint in tokens; None if its config does not say it."""
    return getattr(load_config(name).get_text_config(), "max_position_embeddings", None)
