"""Options of the quickstart. No torch here."""

from __future__ import annotations

from typing import ClassVar

from rlite.config import Count, Options


class QuickstartConfig(Options):
    """Options of `rlite quickstart`."""

    help_example: ClassVar[str] = "steps=60 folder=runs/quickstart"

    folder: str = "runs/quickstart"
    """everything is written here"""
    seed: int = 0
    """seed of problems, weights and sampling"""
    num_train: Count = 16000
    """training problems"""
    num_held_out: Count = 256
    """problems that are only tested on"""
    warm_steps: Count = 700
    """supervised steps"""
    steps: Count = 60
    """GRPO steps"""
    executor: str = "torch"
    """inference executor of the rollouts"""
