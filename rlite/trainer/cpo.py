"""CPO: preferences by log-probabilities, without a reference, beside imitation of the chosen answers.

    torchrun --nproc_per_node=N -m rlite.trainer.cpo actor.model_name=MODEL data.path=pairs.jsonl data.max_length=2048

It is `rlite dpo` with the defaults of `CpoConfig`. A row of data holds `chosen` and `rejected` answers to a `prompt`
or to `messages`.
"""

from __future__ import annotations

from rlite.assembly.command import run_module
from rlite.assembly.presets import CpoConfig

if __name__ == "__main__":  # before the imports of this file, which load torch
    run_module("cpo", CpoConfig)

from rlite.trainer.dpo import DpoTrainer


class CpoTrainer(DpoTrainer):
    """Trainer on preference pairs with the defaults of CPO."""

    name = "cpo"
    config_class = CpoConfig


main = CpoTrainer.main
