"""Options of rewards: `reward.path=file.py:function` for one, `reward.NAME.path=...` for several. No torch here."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from rlite.config import Count, Finite, Options, Positive, Seconds
from rlite.help import single_or_named


class RewardOptions(Options):
    """A reward of single-turn answers, which runs in processes that can be killed."""

    path: str
    """file.py:function, package.module:function, or the name of a reward that `--import` registers"""
    weight: Finite = 1.0
    """factor of this reward in the sum of all"""
    options: dict[str, Any] = {}
    """further keyword arguments of the function, the same for every answer"""
    timeout: Seconds = 15.0
    """seconds for one call"""
    processes: Count | None = None
    """calls that run at the same time; default: the cores, at most 8"""
    memory_limit_gib: Positive | None = None
    """resident memory that a process may have; a call that takes more fails, alone; null: no limit"""
    max_concurrent: Count | None = None
    """calls that may wait for the function at the same time, such as for a judge's server; null: no limit"""
    in_process: bool = False
    """run the function in the trainer's own process: for async functions that only wait, such as for a judge"""
    env_vars: list[str] = []
    """names of environment variables that the processes get as well, such as the key of an API: they see none of the
    run's secrets"""

    @property
    def changed(self) -> list[str]:
        """Names of the options that are not at their defaults, without path and weight."""
        return list(self.model_dump(exclude_defaults=True, exclude={"path", "weight"}))


def name_of(path: str) -> str:
    """Return the name of the reward of a path: the function's name."""
    return re.sub(r"[^\w-]+", "_", re.split(r"[:.]", path)[-1]).strip("_-") or "reward"


def _named_by_function(rewards: dict[str, RewardOptions]) -> dict[str, RewardOptions]:
    return {name or name_of(options.path): options for name, options in rewards.items()}


Rewards = Annotated[
    dict[str, RewardOptions], AfterValidator(_named_by_function), Field(json_schema_extra=single_or_named)
]
"""rewards by name; one that its user did not name has its function's name"""
