"""Small games for tests of environments. Processes that play them import this module, so it imports little."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

PEERS = Path(sys.prefix) / "peers"


class Dice:
    """Says a random number in each turn; how often is an option."""

    def __init__(self, num_steps: int = 2, fault: str = "") -> None:
        self.num_steps, self.fault, self.said = num_steps, fault, ""

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        random.seed(seed)  # as GEM's do
        np.random.seed(seed)
        return (3 if self.fault == "reset" else f"{random.random()} {np.random.random()}"), {}

    def step(self, action: str) -> Any:
        self.num_steps -= 1
        self.said += action
        if self.fault == "raise":
            raise ValueError("no such move")
        if self.fault == "exit":
            sys.exit("game over")
        if self.fault == "hang":
            threading.Event().wait()
        if self.fault == "four":
            return "x", 1.0, False, {}
        if self.fault == "lock":
            self.lock = threading.Lock()
        reward = float("nan") if self.fault == "nan" else np.float32(0.5)
        text = None if self.fault == "text" else f"{self.said}|{random.random()} {np.random.random()}"
        terminated = "no" if self.fault == "flag" else np.bool_(self.num_steps == 0)
        return text, reward, terminated, False, {}


class Unseeded(Dice):
    def __init__(self) -> None:
        self.drawn = random.random()

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        return str(self.drawn), {}


class Sometimes(Dice):
    """Every third one raises at its first step."""

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        assert seed is not None
        self.fault = "raise" if seed % 3 == 0 else ""
        return super().reset(seed)


class Countdown:
    """With TextArena's methods; `wrapped` repeats the whole game each time, as its default wrapper does."""

    def __init__(self, wrapped: bool = False) -> None:
        self.wrapped, self.log, self.num_read = wrapped, [], 0

    def reset(self, num_players: int, seed: int | None = None) -> None:
        assert num_players == 1
        self.log = [(-1, f"from {seed}", "PROMPT")]

    def get_observation(self) -> tuple[int, Any]:
        new, self.num_read = self.log[self.num_read :], len(self.log)
        return 0, "".join(f"<{text}>" for _, text, _ in self.log) if self.wrapped else new

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.log += [(0, action, "PLAYER_ACTION"), (-1, f"after {action}", "GAME_MESSAGE")]
        return len(self.log) > 3, {}

    def close(self) -> tuple[dict[int, float], dict[int, Any]]:
        return {0: 0.75}, {}


def gem_game() -> Any:
    sys.path.append(str(PEERS))  # in the reward process
    return __import__("gem").make("game:GuessTheNumber-v0-easy")


def textarena_game() -> Any:
    return __import__("textarena").make("GuessTheNumber-v0-raw")
