"""A game of GEM as `rollout.env_path`: guess a number from 1 to 10 in four turns, with hints."""

from __future__ import annotations

from typing import Any

import gem


def make(**env_options: Any) -> gem.Env:
    """A new game, as GEM makes it."""
    return gem.make("game:GuessTheNumber-v0-easy", **env_options)
