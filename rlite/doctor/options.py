"""Options of the doctor. No torch here."""

from __future__ import annotations

from rlite.config import Options


class DoctorConfig(Options):
    """Options of `rlite doctor`."""

    self_test: bool = True
    """train and generate with a tiny model"""
    executor: str = "torch"
    """inference executor of the self-test"""
