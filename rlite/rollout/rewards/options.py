"""Options of rewards: `reward.path=file.py:function` for one, `reward.NAME.path=...` for several. No torch here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from rlite.config import Count, Finite, Options, Positive, Seconds
from rlite.errors import ConfigError

UNNAMED = ""
"""name of a single reward until its function names it"""
_NAME = re.compile(r"\w[\w-]*")


class RewardOptions(Options):
    """A reward of single-turn answers, which runs in processes that can be killed."""

    path: str
    """file.py:function, package.module:function, or the name of a reward that `--import` registers"""
    weight: Finite = 1.0
    """factor of this reward in the sum of all"""
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
        default = dict(type(self)(path=self.path, weight=self.weight))
        return [name for name, value in self if value != default[name]]


def single_or_named(schema: dict[str, Any]) -> None:
    """Let the JSON schema of rewards by name also take the options of a single reward.

    Args:
        schema: of an option; it is changed.
    """
    named = next(form for form in schema["anyOf"] if "additionalProperties" in form)
    schema["anyOf"].insert(0, named["additionalProperties"])


def with_names(given: Any) -> Any:
    """Return rewards by name. The options of a single reward without a name get the name UNNAMED.

    Args:
        given: value of the group `reward`.

    Raises:
        ConfigError: some rewards have a name and another has none, or a name cannot be one.
    """
    if isinstance(given, str):
        raise ConfigError(f"reward={given}: expected reward.path={given}")
    if not isinstance(given, Mapping):
        return given
    named = [name for name, value in given.items() if isinstance(value, Mapping | RewardOptions)]
    single = [name for name in given if name not in named]
    for name in single:
        is_path = ":" in str(given[name]) and not difflib.get_close_matches(str(name), ["path"])
        if is_path and name not in RewardOptions.model_fields:
            raise ConfigError(f"reward.{name}={given[name]}: expected reward.{name}.path={given[name]}")
    if named and single:
        raise ConfigError(
            f"reward.{single[0]} is of a single reward, and reward.{named[0]} is one of several: give each its name, "
            f"as in reward.NAME.{single[0]}"
        )
    for name in named:
        if name in RewardOptions.model_fields or not _NAME.fullmatch(str(name)):
            raise ConfigError(
                f"reward.{name}: a reward's name has letters, digits, _ and -, and is none of its options "
                f"({', '.join(RewardOptions.model_fields)})"
            )
    return {UNNAMED: given} if single else given


def named_by_function(rewards: Mapping[str, RewardOptions]) -> dict[str, RewardOptions]:
    """Return rewards, of which one that has no name is named after its function."""
    return {name or name_of(options.path): options for name, options in rewards.items()}


def name_of(path: str) -> str:
    """Return the name of the reward of a path: the function's name."""
    return re.sub(r"[^\w-]+", "_", re.split(r"[:.]", path)[-1]).strip("_-") or "reward"
