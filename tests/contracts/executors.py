"""The inference executors that tests can build here."""

from __future__ import annotations

import importlib.util

from rlite.engine.registry import registered_executors

PACKAGES = {"vllm": "vllm", "sglang": "sglang"}
"""packages that executors need beside rlite's own dependencies; test_sglang.py needs none for the executor "sglang" """


def installed_executors() -> list[str]:
    return [
        name
        for name in registered_executors("inference")
        if name not in PACKAGES or importlib.util.find_spec(PACKAGES[name]) is not None
    ]
