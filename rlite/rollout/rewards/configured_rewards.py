"""The rewards that a config names: found, adapted, and checked against the data before anything is built."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rlite.errors import ConfigError, DataError, did_you_mean
from rlite.rollout.registry import find_reward
from rlite.rollout.rewards.adapters import TrlReward, call_selectively, from_trl, from_verl, signature_of, takes_all
from rlite.rollout.rewards.function import RewardFunction
from rlite.rollout.rewards.groups import GroupReward
from rlite.rollout.rewards.llm_judge import LlmJudge
from rlite.rollout.rewards.models import BATCH, RewardModel
from rlite.rollout.rewards.options import RewardOptions
from rlite.rollout.rewards.weighted import Part, WeightedRewards

ACCEPTED = """\
  rlite  fn(prompt, completions, prompt_ids, completion_ids, **data): the reward of one completion, a text
  TRL    fn(prompts, completions, **columns): a list of rewards, for lists; also fn(completions, answer, **columns)
  verl   compute_score(data_source, solution_str, ground_truth, extra_info=None): the score, or a dict with `score`
data and columns are the other columns of a row."""
_GIVEN = {
    "rlite": ("prompt", "completions", "prompt_ids", "completion_ids"),
    "TRL": ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
    "verl": ("data_source", "solution_str", "extra_info"),
}
"""arguments that do not come from a column of their name, or that need no such column"""
_UNHASHABLE = {"prompt_ids", "completion_ids", "extra_info"}
"""arguments of one completion that are lists or dicts"""
SOURCES = ("path", "model", "label", "num_devices", "judge")
"""options that say what scores"""
Kind = Literal["rlite", "TRL", "verl"]
Row = Mapping[str, Any]


class Adapted(NamedTuple):
    """A reward function with rlite's signature."""

    fn: Callable[..., Any]
    kind: Kind
    """the signature that it was written in"""
    columns: tuple[str, ...]
    """columns of the data that it cannot be called without"""


def adapt(fn: Callable[..., Any], what: str) -> Adapted:
    """Return a reward function of any accepted signature with rlite's signature."""
    if inspect.isclass(fn):
        raise ConfigError(f"{what}: {fn.__name__} is a class; name a function, or an object of the class")
    try:
        signature = signature_of(fn)
    except (TypeError, ValueError):  # some functions that are written in C
        signature = None
    kind = None if signature is None else _kind(signature.parameters)
    if signature is None or kind is None:
        shown = f"{getattr(fn, '__name__', type(fn).__name__)}{signature or '(...)'}"
        raise ConfigError(f"{what}: {shown} has none of the accepted signatures:\n{ACCEPTED}")
    if _has_cache(fn) and (kind == "TRL" or takes_all(signature) or signature.parameters.keys() & _UNHASHABLE):
        raise ConfigError(
            f"{what}: functools.cache refuses lists and dicts, such as completion_ids, with which a reward is called; "
            "cache a function of the text alone, and call it in the reward"
        )
    parameters = signature.parameters.items()
    needed = [name for name, parameter in parameters if _is_needed(parameter) and name not in _GIVEN[kind]]
    if kind == "rlite":
        return Adapted(fn if takes_all(signature) else functools.partial(call_selectively, fn), kind, tuple(needed))
    return Adapted(from_verl(fn) if kind == "verl" else from_trl(fn, is_conversational=None), kind, tuple(needed))


def check_columns(reward: Adapted, rows: Sequence[Row], what: str, where: str) -> None:
    """Check that all rows have the columns that a reward function names."""
    for number, row in enumerate(rows):
        inner = row.get("reward_model") if reward.kind == "verl" else None
        columns = {*row, *(inner if isinstance(inner, Mapping) else ())}  # verl's functions get those inside, too
        if missing := [name for name in reward.columns if name not in columns]:
            raise DataError(
                f"{where}, row index {number}: no column {missing[0]!r}, which {what} takes as an argument "
                f"({reward.kind}'s signature); {did_you_mean(missing[0], columns)}"
            )


def _has_cache(fn: Any) -> bool:
    """Return whether a function has functools.cache or lru_cache, maybe below other decorators."""
    cache = type(functools.lru_cache(len))
    if isinstance(fn, cache) or isinstance(type(fn).__call__, cache):
        return True
    inner = fn.func if isinstance(fn, functools.partial) else getattr(fn, "__func__", getattr(fn, "__wrapped__", None))
    return inner is not None and _has_cache(inner)


def _is_needed(parameter: inspect.Parameter) -> bool:
    is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not is_variadic


def _kind(parameters: Mapping[str, inspect.Parameter]) -> Kind | None:
    """Return the signature to which parameters belong, or None. Functions are called with keywords alone."""
    needed = {name: parameter for name, parameter in parameters.items() if _is_needed(parameter)}
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in needed.values()):
        return None
    if "solution_str" in parameters:
        return "verl" if needed.keys() <= {*_GIVEN["verl"], "ground_truth"} else None
    is_of_one = "completions" in parameters and parameters["completions"].annotation in (str, "str")
    if parameters.keys() & {"prompt", "prompt_ids"} or is_of_one:
        return "rlite" if "completions" in parameters else None
    return "TRL" if parameters.keys() & {"prompts", "completions"} else None


class ChosenReward(NamedTuple):
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

        `is_part`: the reward is one of several. One with TRL's signature may then be None.
        """
        if self.function is not None:
            return self.function
        fn, options = self.adapted.fn, self.options
        if is_part and isinstance(fn, TrlReward):
            fn = dataclasses.replace(fn, is_part=True)
        own = {name: value for name, value in options if name not in (*SOURCES, "weight", "options", "processes")}
        kind = GroupReward if isinstance(fn, TrlReward) else RewardFunction
        return kind(fn, num_processes=options.processes, what=f"reward {self.name}", **own)


class ChosenRewards:
    """The rewards of a config.

    `given`: functions of the program in place of those that the paths name, by name.
    """

    def __init__(
        self, options: Mapping[str, RewardOptions], given: Mapping[str, Callable[..., Any]], key: str = "reward"
    ) -> None:
        keys = {name: key if len(options) == 1 else f"{key}.{name}" for name in options}
        self._rewards = [_choose(name, own, given.get(name), keys[name]) for name, own in options.items()]

    def check_columns(self, rows: Sequence[Row], where: str) -> None:
        """Check that all rows have the columns that the functions name."""
        for reward in self._rewards:
            check_columns(reward.adapted, rows, reward.what, where)

    def make(self) -> RewardFunction | WeightedRewards:
        """Return the reward of a completion: of one function as it is, else the weighted sum."""
        [first, *others] = self._rewards
        if not others and first.options.weight == 1:
            return first.make(is_part=False)
        parts = {each.name: Part(each.make(bool(others)), each.options.weight) for each in self._rewards}
        return WeightedRewards(parts)


def _with_options(fn: Callable[..., Any], options: Mapping[str, Any], key: str) -> Callable[..., Any]:
    """Return a reward function with some of its keyword arguments."""
    signature = signature_of(fn)
    for option in () if takes_all(signature) else options:
        if option not in signature.parameters:
            raise ConfigError(f"{key}.options.{option}: {did_you_mean(option, signature.parameters)}")
    return functools.partial(fn, **options)


def _choose(name: str, options: RewardOptions, given: Callable[..., Any] | None, key: str) -> ChosenReward:
    if given is None and options.path is None:
        return _served(name, options, key)
    what = f"{key}.path={options.path}"
    found = find_reward(str(options.path), what) if given is None else given
    if options.options and not isinstance(found, RewardFunction):
        found = _with_options(found, options.options, key)
    if not isinstance(found, RewardFunction):
        return ChosenReward(name, what, options, None, adapt(found, what))
    if options.changed:
        own = ", ".join(options.changed)
        raise ConfigError(f"{what} is a RewardFunction, which has its own {own}; leave those out")
    return ChosenReward(name, what, options, found, Adapted(found.fn, "rlite", ()))


def _served(name: str, options: RewardOptions, key: str) -> ChosenReward:
    """Return the reward of a model or a judge, whose calls wait in this process."""
    limits: dict[str, Any] = {"timeout": options.timeout, "max_concurrent": options.max_concurrent, "in_process": True}
    if options.judge is None:
        what = f"{key}.model={options.model}"
        fn: Any = RewardModel(str(options.model), what, options.num_devices, options.label)
        function = RewardFunction(fn, batch_size=BATCH, what=f"reward {name}", **limits)
        return ChosenReward(name, what, options, function, Adapted(fn, "rlite", ()))
    fn = LlmJudge(options.judge, f"{key}.judge", options.num_devices)
    function = RewardFunction(fn, what=f"reward {name}", **limits)
    return ChosenReward(name, f"{key}.judge", options, function, Adapted(fn, "rlite", fn.columns))
