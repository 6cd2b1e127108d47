"""GRPO: reinforcement learning from groups of answers, as in DeepSeekMath.

    torchrun --nproc_per_node=N -m rlite.trainer.grpo actor.model_name=MODEL train_data.path=prompts.jsonl ...

It is `rlite ppo` with the defaults of `GrpoConfig`: advantages divided by the group's standard deviation, the mean over
each sequence, and the KL to the reference as a loss.
"""

from __future__ import annotations

from rlite.assembly.command import run_module
from rlite.assembly.presets import GrpoConfig

if __name__ == "__main__":  # before the imports of this file, which load torch
    run_module("grpo", GrpoConfig)

from rlite.trainer.ppo import PpoTrainer


class GrpoTrainer(PpoTrainer):
    """Trainer on rewards with the defaults of GRPO."""

    name = "grpo"
    config_class = GrpoConfig


main = GrpoTrainer.main
