"""The real client of the Tinker API, from its folder outside of the environment, and data for it."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(sys.prefix) / "tinker"
NEWEST = "0.38.0"
TOKENS = {"ann": "tml-0123456789abcdef-ann", "bob": "tml-0123456789abcdef-bob"}


def client_package() -> Any:
    """The package `tinker`, with which the server reads its messages, or a skipped test."""
    folder = FOLDER / NEWEST
    if not (folder / "tinker").is_dir():
        pytest.skip(f"tinker is not in {folder}: `make test` installs it")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last: it shadows no other package
    return importlib.import_module("tinker")


def open_sessions() -> list[str]:
    """Sessions whose clients in this process still send heartbeats."""
    if "tinker" not in sys.modules:
        return []
    holders = importlib.import_module("tinker.lib.internal_client_holder")
    loop = holders._internal_client_holder_thread_singleton.get_loop()

    async def found() -> list[str]:
        running: list[Any] = [task.get_coro() for task in asyncio.all_tasks(loop)]
        return [each.cr_frame.f_locals["session_id"] for each in running if each.__name__ == "_session_heartbeat"]

    return asyncio.run_coroutine_threadsafe(found(), loop).result(60)


def datum(tokens: Sequence[int], targets: Any, **inputs: Any) -> Any:
    """One datum. `targets` are [N] or [N, K]."""
    types = client_package().types
    tensors = {"target_tokens": np.asarray(targets, np.int64), **{k: np.asarray(v, "f4") for k, v in inputs.items()}}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={
            name: types.TensorData(
                data=value.flatten(), dtype="int64" if value.dtype == np.int64 else "float32", shape=list(value.shape)
            )
            for name, value in tensors.items()
        },
    )


def counting(num: int, start: int = 0, length: int = 5) -> list[Any]:
    """Data whose next token is the last one plus one."""
    rows = [[(start + row + place) % 50 for place in range(length + 1)] for row in range(num)]
    return [datum(row[:-1], row[1:], weights=[1.0] * length) for row in rows]
