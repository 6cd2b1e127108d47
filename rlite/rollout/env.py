"""Environments from a Python file: `async step(state, action, extra_info)` returns a dict of STEP_KEYS."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rlite.errors import ConfigError

STEP_KEYS = ("next_state", "reward", "score", "done", "extra_info")


@cache
def load_environment(path: str) -> ModuleType:
    """Import an environment file. Raises: ConfigError if it is not there or has no async function `step`."""
    if not Path(path).is_file():
        raise ConfigError(f"rollout.env_path={path!r}: no such file")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"rollout.env_path={path!r}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not inspect.iscoroutinefunction(getattr(module, "step", None)):
        raise ConfigError(f"rollout.env_path={path!r}: expected `async def step(state, action, extra_info)` in it")
    return module


class EnvironmentReward:
    """A reward function: the reward of an environment's first step; the file is imported where that is computed."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(Path(path).absolute())
        load_environment(self.path)

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
    ) -> float:
        response = await load_environment(self.path).step(prompt, completions, data.get("extra_info") or {})
        missing = [key for key in STEP_KEYS if key not in response]
        if missing:
            raise ConfigError(f"step() in {self.path} returned no {', '.join(missing)}")
        return float(response["reward"])
