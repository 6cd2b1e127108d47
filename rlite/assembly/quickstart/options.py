"""Options of the quickstart. No torch here."""

from __future__ import annotations

from typing import ClassVar

from rlite.config import Count, Seed
from rlite.trainer.options import AnnouncedOptions, TrainerOptions


class QuickstartRunOptions(TrainerOptions):
    """The run of the quickstart, whose options have names of their own."""

    @property
    def limit_key(self) -> str:
        """The option that says how long the run is."""
        return "steps"

    @property
    def folder_key(self) -> str:
        """The option that names the folder."""
        return "folder"


class QuickstartConfig(AnnouncedOptions):
    """Options of `rlite quickstart`."""

    help_example: ClassVar[str] = "steps=60 folder=runs/quickstart"

    folder: str = "runs/quickstart"
    """everything is written here"""
    seed: Seed = 0
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

    def headline(self) -> str:
        """Return in a few words what is trained, on which data, and where the result goes."""
        return f"a small model learns to spell backwards, into {self.folder}"
