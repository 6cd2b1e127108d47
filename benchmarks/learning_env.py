"""The environment of benchmarks/learning.py: one turn, 1 for the right answer and 0 for any other."""

from __future__ import annotations

from typing import Any


async def step(state: str, action: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Judge an answer; the episode ends."""
    reward = float(action.strip() == extra_info["answer"])
    return {"next_state": None, "reward": reward, "score": reward, "done": True, "extra_info": extra_info}
