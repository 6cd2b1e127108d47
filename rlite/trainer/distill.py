"""On-policy distillation: the student learns its teacher's distribution of each token that it writes itself.

    torchrun --nproc_per_node=N -m rlite.trainer.distill actor.model_name=MODEL distill.teacher.model_name=TEACHER ...

It is `rlite ppo` with the defaults of `DistillConfig`: a teacher, one answer to each prompt, and no rewards.
"""

from __future__ import annotations

from rlite.assembly.command import run_module
from rlite.assembly.presets import DistillConfig

if __name__ == "__main__":  # before the imports of this file, which load torch
    run_module("distill", DistillConfig)

from rlite.trainer.ppo import PpoTrainer


class DistillTrainer(PpoTrainer):
    """Trainer on the judgement of a teacher, with or without rewards."""

    name = "distill"
    config_class = DistillConfig


main = DistillTrainer.main
