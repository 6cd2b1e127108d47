"""Options of `rlite env check SPEC`. No torch here."""

from __future__ import annotations

from typing import ClassVar, Literal

from rlite.config import Count, Seconds
from rlite.trainer.options import ImportOptions, SingleTableOptions


class EnvConfig(ImportOptions):
    """Options of `rlite env check SPEC`."""

    without_key: ClassVar[tuple[str, ...]] = ("action", "spec")
    help_arguments: ClassVar[str] = "check SPEC"
    help_example: ClassVar[str] = "check game.py data.path=rows.jsonl"
    prints_json: ClassVar[bool] = True

    action: Literal["check"]
    """check, the first argument without a key"""
    spec: str
    """environment as for rollout.env_path (file or CONTRACT:NAME), name of a registered workflow, or file.py:function,
    which returns a workflow of (gconfig, tokenizer); the second argument without a key"""
    model: str | None = None
    """folder or hub name of the model whose tokenizer and chat template are used; default: bytes, with ChatML"""
    data: SingleTableOptions = SingleTableOptions()
    """rows to play; default: rows with a seed and a question"""
    rows: Count = 2
    """rows of the data to play"""
    episodes: Count = 8
    """episodes of each row, with different answers"""
    answers: list[str] = []
    """texts that the scripted model answers first, such as a right answer; then texts of the row, calls of the tools
    with these texts as arguments, and others"""
    max_turns: Count = 4
    """turns of an episode that are played, for an environment; training has its own limit, rollout.max_turns"""
    timeout: Seconds = 60.0
    """seconds for one episode"""

    def headline(self) -> str:
        """Return in a few words what is checked."""
        return f"checks {self.spec}"
