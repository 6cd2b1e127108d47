"""Options that inference executors share. No torch here: options are checked in the driver."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from rlite.config import Count, Options
from rlite.errors import ConfigError


class ExecutorOptions(Options):
    """Options that every inference executor has."""

    max_model_len: Annotated[int, Ge(2)] | None = None
    """longest sequence, prompt and completion together; default: the model's own limit, with executor torch at most
    4096"""
    max_num_seqs: Count = 128
    """sequences decoded together"""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.9
    """fraction of a GPU's memory for weights and KV cache. On CPU, executor torch does not use it, and executor vllm
    takes at most this fraction of the free memory for the KV cache"""
    dtype: Literal["float32", "float16", "bfloat16", "float64"] | None = None
    """type of weights and KV cache; default: the checkpoint's"""
    seed: int = 0
    """seed of requests without a seed of their own"""


class WrappedOptions(ExecutorOptions):
    """Options of an executor that wraps another program, beside the program's own arguments."""

    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """type of weights and KV cache; default: the checkpoint's"""


def annotated_names(source: Path, classes: Collection[str] = ()) -> frozenset[str]:
    """Return the public annotated names in the bodies of classes, from a source file that is not imported.

    Args:
        source: the file.
        classes: names of the classes; () is all.
    """
    tree = ast.parse(source.read_text(), str(source))
    found = [c for c in tree.body if isinstance(c, ast.ClassDef) and (not classes or c.name in classes)]
    targets = [node.target for c in found for node in c.body if isinstance(node, ast.AnnAssign)]
    return frozenset(t.id for t in targets if isinstance(t, ast.Name) and not t.id.startswith("_"))


class _Signature:
    """The signature of a class of options: its fields, and every argument that it passes on."""

    def __get__(self, instance: object, owner: type[PassingOptions]) -> Signature:
        own = owner.fields.model_fields
        names = [*own, *sorted(owner.arguments() - own.keys())]
        return Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])


class PassingOptions:
    """Options of an executor that passes arguments on to another program as they are.

    Args:
        **values: options of the class `fields`, and arguments of the program.

    Raises:
        ConfigError: a value cannot work, or rlite sets an argument itself.
        UnknownOptionError: an option is unknown.
    """

    __signature__ = _Signature()
    executor: ClassVar[str]
    fields: ClassVar[type[WrappedOptions]] = WrappedOptions
    reserved: ClassVar[Mapping[str, str]]
    """arguments of the program that rlite sets, with the reason or the option to use instead"""

    max_model_len: int | None
    max_num_seqs: int
    gpu_memory_utilization: float
    dtype: str | None
    seed: int

    def __init__(self, **values: Any) -> None:
        for name in self.reserved.keys() & values.keys():
            raise ConfigError(f"executor {self.executor!r} does not take {name}: {self.reserved[name]}")
        names = type(self).arguments() - self.fields.model_fields.keys()
        self.passed_on = {name: value for name, value in values.items() if name in names}
        """arguments of the program"""
        own = self.fields(**{name: value for name, value in values.items() if name not in names})
        vars(self).update(own.model_dump())

    @classmethod
    def arguments(cls) -> frozenset[str]:
        """Return the names of the installed program's arguments that may be given.

        Raises:
            NotImplementedError: the class does not override this method.
        """
        raise NotImplementedError
