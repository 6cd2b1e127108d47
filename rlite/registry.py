"""Look up algorithms and callbacks by name in a `Table`, and check the options of an algorithm.

An algorithm is a function. Its keyword-only parameters are its options. An unknown option, or a value that does not fit
the annotation, is an error before anything is computed.
"""

from __future__ import annotations

import ast
import functools
import inspect
import numbers
import sys
import types
from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from rlite.errors import ConfigError, UnknownOptionError, did_you_mean

Algorithm = TypeVar("Algorithm", bound=Callable[..., Any])


class Table(dict[str, Algorithm]):
    """Algorithms of one kind by name."""

    def __init__(self, kind: str, given: Collection[str], reserved: Collection[str] = ()) -> None:
        super().__init__()
        self.kind, self._given, self._reserved = kind, given, reserved
        self.needs: dict[str, tuple[str, ...]] = {}
        """further keyword arguments that the library gives some of the algorithms, by name of the algorithm"""

    def register(self, name: str, needs: tuple[str, ...] = ()) -> Callable[[Algorithm], Algorithm]:
        """Return a decorator that adds a function under a name, and returns it unchanged.

        The decorator raises ConfigError if another function has the name.
        """

        def enter(function: Algorithm) -> Algorithm:
            if (taken := self.setdefault(name, function)) is not function:
                where = f"{taken.__module__}.{taken.__qualname__}" if hasattr(taken, "__qualname__") else repr(taken)
                raise ConfigError(f"{name!r} is taken by {where}: choose another")
            self.needs[name] = needs
            return function

        return enter

    def unknown(self, name: str) -> str:
        """Return the message for a name that is not in the table."""
        hint = did_you_mean(name, self) if self else "--import FILE.py imports the file that registers it"
        return f"unknown {self.kind} {name!r}; {hint}"

    def name_of(self, algorithm: str | Algorithm) -> str:
        """Return the name of an algorithm, or a function's own name if it is not in the table."""
        if not callable(algorithm):
            if algorithm not in self:
                raise ConfigError(self.unknown(algorithm))
            return algorithm
        names = (name for name, known in self.items() if known is algorithm)
        return next(names, getattr(algorithm, "__name__", "without a name"))

    def check(self, algorithm: str | Algorithm, options: Mapping[str, Any]) -> Algorithm:
        """Return the function of this name, or the given function, which can be called with the options."""
        name = self.name_of(algorithm)
        function = algorithm if callable(algorithm) else self[algorithm]
        reserved = (*self._reserved, *self.needs.get(name, ()))
        check_options(function, options, f"{self.kind} {name}", self._given, reserved)
        return function


_TABLES = {
    "policy loss": "POLICY_LOSSES",
    "advantage": "ADVANTAGES",
    "preference loss": "PREFERENCE_LOSSES",
    "credit": "CREDITS",
}
"""kind -> name of its table in `rlite.algorithms`"""


def algorithms(kind: str) -> Table[Callable[..., Any]]:
    """Return the table of a kind of algorithms, without an import of torch.

    Before `rlite.algorithms` is imported, no code can have registered another algorithm than the library's. The table
    is then read from the sources. Its functions only have the names of their parameters, of which each has a default.
    """
    home = sys.modules.get("rlite.algorithms")
    return _declared(kind) if home is None else getattr(home, _TABLES[kind])


@functools.cache
def _declared(kind: str) -> Table[Callable[..., Any]]:
    table: Table[Callable[..., Any]] = Table(kind, (), ("beta",) if kind == "preference loss" else ())
    for path in (Path(__file__).parent / "algorithms").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):  # functions before their decorators
            arguments = node.args if isinstance(node, ast.FunctionDef) else None
            for call in node.decorator_list if isinstance(node, ast.FunctionDef) else [node]:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == f"register_{kind.replace(' ', '_')}":
                    table.setdefault(ast.literal_eval(call.args[0]), _stub(arguments))
    return table


def _stub(arguments: ast.arguments | None) -> Callable[..., Any]:
    """Return a function with the parameters of a definition; without a definition it takes everything."""
    if arguments is None:
        return lambda *given, **options: None
    named = [inspect.Parameter(each.arg, inspect.Parameter.KEYWORD_ONLY, default=None) for each in arguments.kwonlyargs]
    stub: Any = functools.partial(print)
    stub.__signature__ = inspect.Signature([inspect.Parameter("given", inspect.Parameter.VAR_POSITIONAL), *named])
    return stub


def located(function: Callable[..., Any]) -> str:
    """Return a function's name, its file and its line, such as "plain (my_loss.py:5)"."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function's keyword-only parameters, by name."""
    parameters = _signature(function).parameters.items()
    return {name: parameter.annotation for name, parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def check_options(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    what: str,
    given: Collection[str],
    reserved: Collection[str] = (),
) -> None:
    """Check that an algorithm can be called with these options."""
    known = {name: kind for name, kind in options_of(function).items() if name not in reserved}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in _signature(function).parameters.values())
    for option, value in options.items():
        if option in reserved or (option not in known and not takes_any):
            hint = did_you_mean(option, known) if known else "it has none"
            raise UnknownOptionError(f"{what} has no option {option!r}; {hint}")
        kind = known.get(option, Any)
        if not _fits(value, kind):
            raise ConfigError(f"{what}: {option}={value!r}; expected {_in_words(kind)}")
    try:
        _signature(function).bind(*given, **dict.fromkeys(reserved), **options)
    except TypeError as error:
        arguments = ", ".join([*given, *(f"{name}=..." for name in [*reserved, *options])])
        raise ConfigError(f"{what} cannot be called with ({arguments}): {error}: {located(function)}") from error


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except Exception:  # annotations that only a type checker can evaluate, or texts that are no types
        return inspect.signature(function)


_KINDS: dict[Any, tuple[Any, str]] = {
    float: (numbers.Real, "a number"),
    int: (numbers.Integral, "a whole number"),
    bool: (bool, "true or false"),
    str: (str, "a text"),
    types.NoneType: (types.NoneType, "null"),
}


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value fits an annotation. Every value fits an annotation that is not one of the simple kinds."""
    if get_origin(kind) is Literal:
        return isinstance(value, Hashable) and value in get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if kind not in _KINDS:
        return True
    return isinstance(value, _KINDS[kind][0]) and (kind is bool or not isinstance(value, bool))


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(map(_in_words, get_args(kind)))
    return _KINDS[kind][1]
