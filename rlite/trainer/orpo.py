"""ORPO: preferences by odds ratios, without a reference, beside imitation of the chosen answers.

    torchrun --nproc_per_node=N -m rlite.trainer.orpo actor.model_name=MODEL data.path=pairs.jsonl data.max_length=2048

It is `rlite dpo` with the defaults of `OrpoConfig`. A row of data holds `chosen` and `rejected` answers to a `prompt`
or to `messages`.
"""

from __future__ import annotations

from rlite.assembly.command import run_module
from rlite.assembly.presets import OrpoConfig

if __name__ == "__main__":  # before the imports of this file, which load torch
    run_module("orpo", OrpoConfig)

from rlite.trainer.dpo import DpoTrainer


class OrpoTrainer(DpoTrainer):
    """Trainer on preference pairs with the defaults of ORPO."""

    name = "orpo"
    config_class = OrpoConfig


main = OrpoTrainer.main
