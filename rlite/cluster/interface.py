"""Interface of a worker's class: what its callers need to know, for processes that do not import the class itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any


@dataclass(frozen=True)
class Method:
    """One public method."""

    signature: inspect.Signature
    """names and kinds of the parameters, without annotations; a default is None"""
    marks: Mapping[str, Any]
    """attributes that `@ray.method` set"""


@dataclass(frozen=True)
class Interface:
    """Public synchronous methods of a class. It pickles without a reference to the class or its module."""

    name: str
    module: str
    methods: Mapping[str, Method]


def interface_of(cls: type) -> Interface:
    """Return the interface of a class."""
    names = [name for name in dir(cls) if isinstance(inspect.getattr_static(cls, name), FunctionType)]
    functions = {name: getattr(cls, name) for name in names if not name.startswith("_")}
    methods = {name: _method(each) for name, each in functions.items() if not inspect.iscoroutinefunction(each)}
    return Interface(cls.__name__, cls.__module__, methods)


def _method(function: FunctionType) -> Method:
    marks = {name: value for name, value in vars(function).items() if name.startswith("__ray_")}
    return Method(inspect.Signature([_bare(each) for each in inspect.signature(function).parameters.values()]), marks)


def _bare(parameter: inspect.Parameter) -> inspect.Parameter:
    has_default = parameter.default is not inspect.Parameter.empty
    default = None if has_default else inspect.Parameter.empty
    return parameter.replace(annotation=inspect.Parameter.empty, default=default)
