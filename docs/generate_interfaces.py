"""Write `docs/interfaces.md`: every public name with its arguments and the first line of its docstring.

    make interfaces        or        python docs/generate_interfaces.py

A test compares the page with the code.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pydantic

PAGE = Path(__file__).with_name("interfaces.md")
MODULES = {
    "rlite": "The session, engines, dispatch and statistics.",
    "rlite.api": "A run in one call.",
    "rlite.nn": "Modules to subclass.",
    "rlite.rollout": "Workflows, environments, tools and the collector.",
    "rlite.rollout.rewards": "Reward functions.",
    "rlite.rollout.registry": "Names for commands.",
    "rlite.rollout.openai": "Agents.",
    "rlite.rollout.contracts": "Environments of other libraries.",
    "rlite.types": "Plain data that travels.",
    "rlite.algorithms": "Functions of tensors.",
    "rlite.trainer.sft": "Supervised fine-tuning.",
    "rlite.trainer.rm": "Reward models.",
    "rlite.trainer.dpo": "Preference training.",
    "rlite.trainer.ppo": "Reinforcement learning.",
    "rlite.trainer.callbacks": "Callbacks of the trainers.",
    "rlite.trainer.sampling": "Samplers of prompts.",
    "rlite.viewer": "A run as DataFrames.",
    "rlite.control": "The control plane.",
    "rlite.errors": "The error tree.",
}
PARTS = {"rlite.types": ("rlite.generation",)}
"""modules whose names another module has, too"""
OPTIONS = {
    "torch": "rlite.backends.embedded.cache:EmbeddedOptions",
    "remote": "rlite.backends.remote.server:RemoteOptions",
    "fsdp2": "rlite.backends.fsdp2.options:Fsdp2Options",
}
"""executors whose options are a table; those of vllm and sglang depend on the installed package"""
HEAD = """# Interfaces

`make interfaces` writes this page from the code: every public name, its arguments with their defaults, and the first
line of its docstring. `help(NAME)` in Python shows all of it. `rlite COMMAND --help` prints the options of commands.

"""


def page() -> str:
    """The whole page."""
    contents = "".join(f"- [`{name}`](#{name.replace('.', '')}): {what}\n" for name, what in MODULES.items())
    contents += "- [Options of `build`](#options-of-build)\n\n"
    options = "## Options of `build`\n\nThe options of `vllm` and `sglang` are those of their releases.\n\n"
    options += "".join(map(option_table, OPTIONS))
    return HEAD + contents + "".join(map(module_part, MODULES)) + options.rstrip() + "\n"


def module_part(name: str) -> str:
    """The names of a module. A class has its methods below it."""
    lines = [f"## {name}\n", f"{MODULES[name]}\n"]
    for public, value in public_names(name):
        if inspect.isclass(value):
            lines += [entry(public, value, "class "), *methods(value)]
        else:
            lines.append(entry(public, value))
    return "\n".join(lines) + "\n\n"


def public_names(module_name: str) -> Iterator[tuple[str, Any]]:
    """Names in `__all__`; without it, public classes and functions that the module defines. One spelling of each."""
    module = importlib.import_module(module_name)
    names = getattr(module, "__all__", None)
    if names is None:
        values = vars(module).items()
        # `algorithms` collects the names of its files; any other module without `__all__` has its own
        homes = (f"{module_name}." if hasattr(module, "__path__") else module_name, *PARTS.get(module_name, ()))
        names = [name for name, value in values if getattr(value, "__module__", "").startswith(homes)]
    for name in sorted((name for name in names if not name.startswith("_")), key=str.lower):
        value = getattr(module, name)
        if not name.startswith("RLite") and (callable(value) or inspect.ismodule(value)):
            yield name, value


def entry(name: str, value: Any, kind: str = "") -> str:
    """One line of the page."""
    summary = inspect.getdoc(value) if value.__doc__ else None
    what = f": {summary.splitlines()[0]}" if summary else ""
    return f"- {kind}`{name}{arguments(value)}`{what}"


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that rlite's own classes define."""
    if issubclass(cls, BaseException | Enum | pydantic.BaseModel):
        return
    own = [base for base in cls.__mro__ if base.__module__.startswith("rlite.")]
    names = {name: None for base in own for name in vars(base) if not name.startswith("_")}
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for name in sorted(names.keys() - fields):
        value = inspect.getattr_static(cls, name)
        if isinstance(value, classmethod | staticmethod):
            value = value.__func__
        if isinstance(value, property | functools.cached_property) or inspect.isfunction(value):
            yield name, value


def methods(cls: type) -> list[str]:
    """Lines of the members of a class."""
    return [f"  {entry(name, value, '' if inspect.isfunction(value) else 'property ')}" for name, value in members(cls)]


def arguments(value: Any) -> str:
    """The arguments with their defaults, without annotations; nothing for properties, errors and modules."""
    if isinstance(value, property | functools.cached_property) or not callable(value):
        return ""
    if inspect.isclass(value) and issubclass(value, BaseException | Enum):
        return ""
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return "(...)"
    written, has_star = [], False
    for parameter in parameters:
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            written.append("*")
        has_star |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        written.append(f"{stars}{parameter.name}{default(parameter)}")
    return f"({', '.join(written)})"


def default(parameter: inspect.Parameter) -> str:
    """The default as it is written in a call; `...` for an object."""
    value = parameter.default
    if value is parameter.empty:
        return ""
    is_plain = value is None or isinstance(value, str | int | float | bool | tuple | list | dict)
    return f"={value!r}" if is_plain and not isinstance(value, Enum) else "=..."


def option_table(executor: str) -> str:
    """The options of an executor, with their defaults and descriptions."""
    module, name = OPTIONS[executor].split(":")
    fields = getattr(importlib.import_module(module), name).model_fields
    rows = [f"| `{option}` | `{field.default}` | {one_line(field.description)} |" for option, field in fields.items()]
    return "\n".join([f"### {executor}\n", "| option | default | meaning |", "|---|---|---|", *rows]) + "\n\n"


def one_line(text: str | None) -> str:
    """A description as a cell of a table."""
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
