"""The rewards that a config names: found, adapted, and checked against the data before anything is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlite.errors import ConfigError
from rlite.rollout.registry import find_reward
from rlite.rollout.rewards.adapters import TrlReward
from rlite.rollout.rewards.function import RewardFunction
from rlite.rollout.rewards.options import RewardOptions
from rlite.rollout.rewards.signatures import Adapted, Row, adapt, check_columns
from rlite.rollout.rewards.weighted import Part, WeightedRewards


@dataclass(frozen=True)
class ChosenReward:
    """A reward of a config."""

    name: str
    what: str
    """option and value that chose it, for error messages"""
    options: RewardOptions
    function: RewardFunction | None
    """the user's own RewardFunction"""
    adapted: Adapted
    """the function with rlite's signature"""

    def make(self, is_part: bool) -> RewardFunction:
        """Return the function in processes of its own.

        Args:
            is_part: the reward is one of several. One with TRL's signature may then be None.

        Raises:
            ConfigError: an option is out of range, or the function cannot be sent to a process.
        """
        if self.function is not None:
            return self.function
        fn, options = self.adapted.fn, self.options
        if is_part and isinstance(fn, TrlReward):
            fn = dataclasses.replace(fn, is_part=True)
        return RewardFunction(
            fn,
            timeout=options.timeout,
            num_processes=options.processes,
            in_process=options.in_process,
            memory_limit_gib=options.memory_limit_gib,
            max_concurrent=options.max_concurrent,
            what=f"reward {self.name}",
            env_vars=options.env_vars,
        )


class ChosenRewards:
    """The rewards of a config.

    Args:
        options: the group `reward` of the config, by name.
        given: functions of the program in place of those that the paths name, by name.
        key: the group of options, for error messages.

    Raises:
        ConfigError: a function does not exist, or has none of the accepted signatures.
        ImportFailed: a file or module does not exist, or raised an exception. The message has the user's traceback.
    """

    def __init__(
        self, options: Mapping[str, RewardOptions], given: Mapping[str, Callable[..., Any]], key: str = "reward"
    ) -> None:
        single = len(options) == 1
        self._rewards = [
            _choose(name, own, given.get(name), key if single else f"{key}.{name}") for name, own in options.items()
        ]

    def check_columns(self, rows: Sequence[Row], where: str) -> None:
        """Check that all rows have the columns that the functions name.

        Args:
            rows: rows of the data.
            where: option of the data, for error messages.

        Raises:
            DataError: a column is missing. The message has the nearest column's name.
        """
        for reward in self._rewards:
            check_columns(reward.adapted, rows, reward.what, where)

    def make(self) -> RewardFunction | WeightedRewards:
        """Return the reward of a completion: of one function as it is, else the weighted sum.

        Raises:
            ConfigError: an option is out of range, or a function cannot be sent to a process.
        """
        [first, *others] = self._rewards
        if not others and first.options.weight == 1:
            return first.make(is_part=False)
        is_part = bool(others)
        return WeightedRewards({each.name: Part(each.make(is_part), each.options.weight) for each in self._rewards})


def _choose(name: str, options: RewardOptions, given: Callable[..., Any] | None, key: str) -> ChosenReward:
    what = f"{key}.path={options.path}"
    found = find_reward(options.path, what) if given is None else given
    if not isinstance(found, RewardFunction):
        return ChosenReward(name, what, options, None, adapt(found, what))
    if options.changed:
        raise ConfigError(
            f"{what} is a RewardFunction, which has its own {', '.join(options.changed)}; leave those out"
        )
    return ChosenReward(name, what, options, found, Adapted(found.fn, "rlite", ()))
