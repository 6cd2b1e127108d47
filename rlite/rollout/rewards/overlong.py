"""Penalise answers that come close to the longest length: a reward part without a cliff at the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlite.errors import ConfigError


def overlong_penalty(
    prompt: Any,
    completions: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    max_length: int,
    cache: int,
    **data: Any,
) -> float:
    """Return the soft overlong punishment of DAPO (arXiv:2503.14476, equation 13), in [-1, 0].

        R(y) = 0                                 |y| <= max_length - cache
               (max_length - cache - |y|) / cache    up to max_length
               -1                                beyond

    As one of several rewards: `reward.overlong.path=rlite.rollout.rewards:overlong_penalty
    reward.overlong.options.max_length=4096 reward.overlong.options.cache=1024 reward.overlong.in_process=true`.

    Args:
        prompt: not read.
        completions: not read.
        prompt_ids: not read.
        completion_ids: tokens of the answer; in several turns those of the last one.
        max_length: length from which on the penalty is -1, usually max_new_tokens.
        cache: tokens before `max_length` over which the penalty grows.
        **data: not read.

    Raises:
        ConfigError: `cache` is not between 1 and `max_length`.
    """
    if not 0 < cache <= max_length:
        raise ConfigError(f"overlong_penalty: cache={cache}, max_length={max_length}; expected 0 < cache <= max_length")
    return min(0.0, max(-1.0, (max_length - cache - len(completion_ids)) / cache))
