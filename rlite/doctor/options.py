"""Options of the doctor. No torch here."""

from __future__ import annotations

from typing import ClassVar

from rlite.config import Options


class DoctorConfig(Options):
    """Options of `rlite doctor`."""

    help_example: ClassVar[str] = "executor=vllm"

    self_test: bool = True
    """train and generate with a tiny model"""
    executor: str = "torch"
    """inference executor of the self-test"""
