"""A game of GEM as `rollout.env_path`: guess a number from 1 to 50 in four turns, with hints."""

from __future__ import annotations

from typing import Any

import gem


def make(**env_options: Any) -> gem.Env:
    """A new game, as GEM makes it, in four turns instead of seven: a turn that is wasted is missed."""
    return gem.make("game:GuessTheNumber-v0-hard", max_turns=4, **env_options)
