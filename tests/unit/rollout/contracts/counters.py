"""Environments with TRL's contract."""

from __future__ import annotations

import time
from typing import Any


class Counter:
    """A number that the model shall bring to the row's target."""

    def reset(self, target: int, **row: Any) -> str:
        self.value, self.target = 0, target
        return f" Target: {target}."

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: what to add
        """
        if number < 0:
            raise ValueError("only up")
        self.value += number
        return f"now {self.value}"

    def sleep(self) -> str:
        """Sleep for long."""
        time.sleep(3600)
        return "rested"

    def get_reward(self) -> float:
        return 1.0 if self.value == self.target else 0.0


class Silent:
    """An environment without a reward of its own."""

    def reset(self, **row: Any) -> None:
        self.words: list[str] = []

    async def say(self, word: str) -> str:
        """Say a word.

        Args:
            word: the word
        """
        self.words.append(word)
        return "said"


FACTORIES = {"counter": Counter, "silent": Silent}


def num_words(completions: list[Any], environments: list[Any], **columns: Any) -> list[float]:
    """Reward of the words that each environment has heard, beside the number of environments."""
    return [len(environment.words) + 100 * len(environments) for environment in environments]


def share_of_e(completions: list[Any], environments: list[Any], **columns: Any) -> list[float]:
    """Share of letters "e" in each answer."""
    texts = [completion[-1]["content"] for completion in completions]
    return [text.count("e") / max(len(text), 1) for text in texts]
