"""The trainers by the names of their commands. No torch here, and no options before they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple


class TrainerEntry(NamedTuple):
    """One trainer: a module with `main`, its class there, and the class of its options."""

    module: str
    trainer: str
    options: str
    """module:class"""

    def find_trainer(self) -> type[Any]:
        """Return the class of the trainer, which is imported now, with torch."""
        return getattr(importlib.import_module(self.module), self.trainer)


_PRESETS = "rlite.assembly.presets"

TRAINERS: Mapping[str, TrainerEntry] = {
    "sft": TrainerEntry("rlite.trainer.sft", "SftTrainer", "rlite.trainer.supervised_options:SftConfig"),
    "rm": TrainerEntry("rlite.trainer.rm", "RmTrainer", "rlite.trainer.supervised_options:RmConfig"),
    "dpo": TrainerEntry("rlite.trainer.dpo", "DpoTrainer", "rlite.trainer.supervised_options:DpoConfig"),
    "orpo": TrainerEntry("rlite.trainer.orpo", "OrpoTrainer", f"{_PRESETS}:OrpoConfig"),
    "simpo": TrainerEntry("rlite.trainer.simpo", "SimpoTrainer", f"{_PRESETS}:SimpoConfig"),
    "cpo": TrainerEntry("rlite.trainer.cpo", "CpoTrainer", f"{_PRESETS}:CpoConfig"),
    "kto": TrainerEntry("rlite.trainer.kto", "KtoTrainer", "rlite.trainer.supervised_options:KtoConfig"),
    "ppo": TrainerEntry("rlite.trainer.ppo", "PpoTrainer", "rlite.trainer.rl.options:PpoConfig"),
    "distill": TrainerEntry("rlite.trainer.distill", "DistillTrainer", f"{_PRESETS}:DistillConfig"),
    "grpo": TrainerEntry("rlite.trainer.grpo", "GrpoTrainer", f"{_PRESETS}:GrpoConfig"),
}
