"""`@trainer_invocation`: how a role group calls a method of a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from rlite.errors import ConfigError, UnknownOptionError, did_you_mean

Target = Literal["ALL", "RANK0"]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """Options of a call from the trainer. Creating one checks them."""

    blocking: bool = True
    """wait for the results; False returns Ray's object references at once"""
    is_async: bool = False
    """if blocking, wait at most `timeout` seconds"""
    timeout: float = 10
    """seconds, for `is_async`; then CallTimeout names the late workloads"""
    target: Target = "ALL"
    """ALL returns one result for each workload, RANK0 the result of rank 0"""
    auto_shard: bool = True
    """split lists that have one item for each target"""
    pre_func: Callable[..., Any] | None = None
    """called in the trainer with the arguments; returns the new argument, or a tuple of new arguments"""
    post_func: Callable[[Any], Any] | None = None
    """called in the trainer with what the call would return; returns what the call returns instead"""

    def __post_init__(self) -> None:
        for name in ("blocking", "is_async", "auto_shard"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"trainer_invocation({name}={value!r}): expected True or False")
        is_number = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if not is_number or not 0 < self.timeout < float("inf"):
            raise ConfigError(f"trainer_invocation(timeout={self.timeout!r}): expected a number of seconds above 0")
        if self.target not in get_args(Target):
            hint = did_you_mean(str(self.target), get_args(Target))
            raise ConfigError(f"trainer_invocation(target={self.target!r}): expected 'ALL' or 'RANK0'; {hint}")
        for name in ("pre_func", "post_func"):
            if (value := getattr(self, name)) is not None and not callable(value):
                raise ConfigError(f"trainer_invocation({name}={value!r}): expected a function")
        if not self.blocking and (self.is_async or self.post_func):
            other = "is_async=True" if self.is_async else "post_func"
            raise ConfigError(f"trainer_invocation(blocking=False, {other}): without blocking there is no result yet")


DEFAULT = Invocation()


def trainer_invocation(**options: Any) -> Callable[[Function], Function]:
    """Return a decorator that states how role groups call a workload's method; `Invocation` has the options.

    Raises:
        UnknownOptionError: an unknown option.
        ConfigError: an option's value cannot work.
    """
    known = Invocation.__dataclass_fields__
    for name in options:
        if name not in known:
            near = {"pre_function": "pre_func", "post_function": "post_func"}.get(name)
            hint = f"did you mean {near!r}?" if near else did_you_mean(name, known)
            raise UnknownOptionError(f"trainer_invocation({name}=...): unknown option; {hint}")
    invocation = Invocation(**options)

    def mark(function: Function) -> Function:
        function.__rlite_invocation__ = invocation  # type: ignore[attr-defined]
        return function

    return mark


def invocation_of(function: Callable[..., Any]) -> Invocation:
    """Return how role groups call a method."""
    return getattr(function, "__rlite_invocation__", DEFAULT)
