"""GRPO: reinforcement learning from groups of answers, as DeepSeekMath has it.

    torchrun --nproc_per_node=N -m rlite.trainer.grpo actor.model_name=MODEL train_data.path=prompts.jsonl ...

It is `rlite ppo` with the defaults of `GrpoConfig`: advantages divided by the group's standard deviation, the mean over
each sequence, and the KL to the reference as a loss.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlite.trainer import ppo
from rlite.trainer.preset_options import GrpoConfig
from rlite.trainer.run.command import run


class GrpoTrainer(ppo.PpoTrainer):
    """Trainer on rewards with the defaults of GRPO."""

    name = "grpo"
    config_class = GrpoConfig


def main(argv: Sequence[str]) -> None:
    """Run the trainer from the command line."""
    ppo.main(argv, GrpoTrainer)


if __name__ == "__main__":
    run("grpo", main, sys.argv[1:])
