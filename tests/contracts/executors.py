"""The inference executors that tests can build here, and what engines call on their workers."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlite.cluster.group import WorkerGroup
from rlite.engine.registry import registered_executors

PACKAGES = {"vllm": "vllm", "sglang": "sglang"}
"""packages that executors need beside rlite's own dependencies; test_sglang.py needs none for the executor "sglang" """


def installed_executors() -> list[str]:
    return [
        name
        for name in registered_executors("inference")
        if name not in PACKAGES or importlib.util.find_spec(PACKAGES[name]) is not None
    ]


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
