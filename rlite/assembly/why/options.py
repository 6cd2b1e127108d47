"""Options of `rlite why`. No torch here."""

from __future__ import annotations

from typing import ClassVar

from rlite.config import Count
from rlite.trainer.options import AnnouncedOptions


class WhyConfig(AnnouncedOptions):
    """Options of `rlite why RUN`."""

    without_key: ClassVar[tuple[str, ...]] = ("run",)
    help_arguments: ClassVar[str] = "RUN"
    help_example: ClassVar[str] = "runs/grpo step=12"
    help_first: ClassVar[tuple[str, ...]] = ("step", "sequences", "tokens")

    run: str
    """folder of a run with rollouts; the first argument without a key"""
    step: Count | None = None
    """step whose recorded tokens are explained; null takes the newest step whose weights are there"""
    sequences: Count = 4
    """recorded sequences that are scored again"""
    tokens: Count = 64
    """tokens of the model that are scored again, over all sequences"""
    code: str | None = None
    """your file or module to import first, such as one with a model class of your own; null runs no code of the run"""

    def headline(self) -> str:
        """Return in a few words what is done."""
        return f"scores tokens of {self.run} again on the CPU"
