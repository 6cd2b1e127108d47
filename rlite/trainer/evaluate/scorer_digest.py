"""Digests of the code that scores answers. Samples that other code has scored are not mixed with them."""

from __future__ import annotations

import functools
import hashlib
import inspect
import marshal
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from rlite.rollout.registry import WORKFLOWS, find_reward
from rlite.rollout.rewards.adapters import TrlReward
from rlite.rollout.rewards.function import RewardFunction
from rlite.trainer.evaluate.options import EvalConfig
from rlite.trainer.run.program_objects import ProgramObjects


def code_of(options: EvalConfig, given: ProgramObjects) -> dict[str, str]:
    """Return a digest of the code behind each source of scores, by the file or the name of the source.

    Args:
        options: options of the command.
        given: rewards of a program, in place of those that the paths name.

    Raises:
        ConfigError: a reward does not exist.
        ImportFailed: the file or module of a reward does not exist, or raised an exception.
    """
    found: dict[str, str] = {}
    functions = given.functions()
    for name, own in options.reward.items():
        file = Path(own.path.rpartition(":")[0])
        if file.is_file() and name not in functions:
            found[str(file)] = digest([file.read_bytes()])
        else:
            found[own.path] = digest_of(functions.get(name) or find_reward(own.path, f"reward.{name}.path"))
    if options.env_path is not None and Path(options.env_path).is_file():
        found[options.env_path] = digest([Path(options.env_path).read_bytes()])
    if options.workflow is not None:
        found[options.workflow] = digest_of(WORKFLOWS[options.workflow])
    return found


def digest_of(scorer: Any) -> str:
    """Return a digest of the code of a function, a class or a callable object.

    The code is the whole file of the definition. For code of the program itself (`__main__`) and code without a file it
    is the function alone. An object without any Python code gets a digest that equals no other.

    Args:
        scorer: a reward or the maker of a workflow.
    """
    contents = {_content(function) for function in _functions(scorer)}
    return digest(sorted(contents)) if contents else f"unknown {secrets.token_hex(8)}"


def digest(parts: Iterable[str | bytes]) -> str:
    """Return a short digest of texts or bytes, in this order."""
    made = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        made.update(hashlib.sha256(content).digest())
    return made.hexdigest()[:16]


def _functions(scorer: Any) -> Iterator[FunctionType]:
    """Yield the functions behind a callable object, or those of its class."""
    if isinstance(scorer, functools.partial):
        yield from _functions(scorer.func)
    elif isinstance(scorer, RewardFunction):
        yield from _functions(scorer.fn)
    elif isinstance(scorer, TrlReward):
        for each in scorer.fns:
            yield from _functions(each)
    else:
        yield from _own_functions(inspect.unwrap(getattr(scorer, "__func__", scorer)))


def _own_functions(scorer: Any) -> Iterator[FunctionType]:
    if isinstance(scorer, FunctionType):
        yield scorer
        return
    kind = scorer if isinstance(scorer, type) else type(scorer)
    yield from (own for own in vars(kind).values() if isinstance(own, FunctionType))


def _content(function: FunctionType) -> bytes:
    file = Path(function.__code__.co_filename)
    if function.__module__ != "__main__" and file.is_file():
        return file.read_bytes()
    try:
        return inspect.getsource(function).encode()
    except (OSError, TypeError):
        return marshal.dumps(function.__code__, 2)  # the later formats depend on reference counts
