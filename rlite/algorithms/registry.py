"""Algorithms by name: a table is a plain dict, and these are the ways to add to it and to look into it.

An algorithm is a function. What it takes beyond its tensors are keyword parameters, and those are its options: an
option that no parameter is named after, or whose value is not of the annotated kind, is an error before anything is
computed.
"""

from __future__ import annotations

import inspect
import numbers
import types
from collections.abc import Callable, Collection, Hashable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rlite.errors import ConfigError, UnknownOptionError, did_you_mean

Algorithm = TypeVar("Algorithm", bound=Callable[..., Any])


def register(table: dict[str, Algorithm], name: str) -> Callable[[Algorithm], Algorithm]:
    """A decorator that enters a function into `table`. Raises: ConfigError if another function has the name."""

    def enter(function: Algorithm) -> Algorithm:
        if table.setdefault(name, function) is not function:
            raise ConfigError(
                f"{name!r} is taken by {table[name].__module__}.{table[name].__qualname__}: choose another"
            )
        return function

    return enter


def find(table: Mapping[str, Algorithm], name: str | Algorithm, what: str) -> Algorithm:
    """The function of that name; a function is itself. Raises: ConfigError with the nearest known name."""
    if callable(name):
        return name
    if name not in table:
        raise ConfigError(f"unknown {what} {name!r}; {did_you_mean(name, table)}")
    return table[name]


def name_of(table: Mapping[str, Algorithm], function: Algorithm) -> str:
    """How messages call a function: its name in the table, or its own."""
    names = (name for name, known in table.items() if known is function)
    return next(names, getattr(function, "__name__", "without a name"))


def keyword_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function that can only be given by name; `**` of it included."""
    parameters = inspect.signature(function).parameters
    return {k: p for k, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)}


def check_options(
    function: Callable[..., Any], options: Mapping[str, Any], what: str, *, reserved: Collection[str] = ()
) -> None:
    """Raise UnknownOptionError for an option that is no keyword parameter of `function`, or that is `reserved` for
    what the caller itself gives; ConfigError for a number, truth value, text or choice that is none by the parameter's
    annotation."""
    parameters = keyword_parameters(function)
    known = [k for k, p in parameters.items() if k not in reserved and p.kind is p.KEYWORD_ONLY]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    annotations = _annotations(function) if options else {}
    for option, value in options.items():
        if option in reserved or (option not in known and not takes_any):
            hint = did_you_mean(option, known) if known else "it has none"
            raise UnknownOptionError(f"{what} has no option {option!r}; {hint}")
        kind = annotations.get(option, Any)
        if not _is_of(value, kind):
            raise ConfigError(f"{what}: {option}={value!r}; expected {_in_words(kind)}")


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    function = function.func if isinstance(function, partial) else function
    try:
        return get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
    except Exception:  # names that only a type checker sees, or texts that are no types
        return {}


_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    float: ((numbers.Real,), "a number"),
    int: ((numbers.Integral,), "a whole number"),
    bool: ((bool,), "true or false"),
    str: ((str,), "a text"),
    types.NoneType: ((types.NoneType,), "null"),
}


def _is_of(value: Any, kind: Any) -> bool:
    """Whether it fits an annotation; one that is none of the simple kinds fits everything."""
    if get_origin(kind) is Literal:
        return isinstance(value, Hashable) and value in get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return any(_is_of(value, one) for one in get_args(kind))
    if kind not in _KINDS:
        return True
    return isinstance(value, _KINDS[kind][0]) and (kind is bool or not isinstance(value, bool))


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(map(_in_words, get_args(kind)))
    return _KINDS[kind][1]
