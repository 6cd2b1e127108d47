"""Puzzles of reasoning-gym as `rollout.env_path`: one turn, 1 if the task's own verifier scores it in full, else 0."""

from __future__ import annotations

from typing import Any

from rlite.rollout.rewards.reasoning import verify_exactly


async def step(state: str, action: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Judge an answer; the episode ends."""
    reward = verify_exactly(state, action, [], [], **extra_info)
    return {"next_state": None, "reward": reward, "score": reward, "done": True, "extra_info": extra_info}
