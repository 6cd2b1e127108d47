"""ORPO: preferences by odds ratios, without a reference, beside imitation of the chosen answers.

    torchrun --nproc_per_node=N -m rlite.trainer.orpo actor.model_name=MODEL data.path=pairs.jsonl data.max_length=2048

It is `rlite dpo` with the defaults of `OrpoConfig`. A row of data holds `chosen` and `rejected` answers to a `prompt`
or to `messages`.
"""

from __future__ import annotations

import sys

from rlite.trainer.dpo import DpoTrainer
from rlite.trainer.preset_options import OrpoConfig
from rlite.trainer.run.command import run


class OrpoTrainer(DpoTrainer):
    """Trainer on preference pairs with the defaults of ORPO."""

    name = "orpo"
    config_class = OrpoConfig


main = OrpoTrainer.main

if __name__ == "__main__":
    run("orpo", main, sys.argv[1:])
