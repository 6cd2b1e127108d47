"""Rewards of the integration tests. Each reward process imports this module, so it imports nothing heavy."""

from __future__ import annotations

from typing import Any


def digits(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    return sum(character.isdigit() for character in completions) / max(len(completions), 1)


def distinct(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    return float(len(set(completions)))
