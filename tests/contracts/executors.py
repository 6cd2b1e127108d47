"""The table of inference executors under the contract tests, and what engines call on their workers."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from rlite.backends.serving.pump import PumpedWorker
from rlite.backends.sglang.worker import SglangWorker
from rlite.backends.vllm.worker import VllmWorker
from rlite.engine.registry import register_executor
from rlite.runtime.cluster.group import WorkerGroup
from tests.third_party_executor.replica import PushedWorker

register_executor("inference", "pushing", "tests.third_party_executor.backend:BACKEND")


@dataclass(frozen=True, kw_only=True)
class TestedExecutor:
    """What the contract tests need to know of an executor."""

    worker: type
    """class or protocol of its workers"""
    package: str = "rlite"
    """package without which its engines are not built"""
    max_model_len: int = 2048
    """a request of so many tokens does not end before it is interrupted, also on a busy machine"""
    num_long: int = 200
    """tokens of a request that is interrupted, goes on and ends"""


EXECUTORS = {
    "torch": TestedExecutor(worker=PumpedWorker),
    # about one millisecond per token, whether it is called or not
    "vllm": TestedExecutor(worker=VllmWorker, package="vllm", max_model_len=16384, num_long=2000),
    "sglang": TestedExecutor(worker=SglangWorker, package="sglang"),  # test_sglang.py needs no package
    "pushing": TestedExecutor(worker=PushedWorker),
}
"""executors by name; a new one is registered and gets a line here"""


def installed_executors() -> list[str]:
    return [name for name, tested in EXECUTORS.items() if importlib.util.find_spec(tested.package) is not None]


def declared(protocol: type) -> set[str]:
    """The methods of a protocol."""
    return {name for name, value in inspect.getmembers(protocol, callable) if not name.startswith("_")}


@contextmanager
def recorded_calls() -> Iterator[set[str]]:
    """Collect the names of the methods that engines call on workers."""
    called: set[str] = set()
    call, keep = WorkerGroup.call, WorkerGroup.keep

    def recording_call(group: WorkerGroup, method: str, *args: Any, **kwargs: Any) -> Any:
        called.add(method)
        return call(group, method, *args, **kwargs)

    def recording_keep(group: WorkerGroup, method: str) -> Any:
        called.add(method)
        return keep(group, method)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerGroup, "call", recording_call)
        patch.setattr(WorkerGroup, "keep", recording_keep)
        yield called
