"""SimPO: preferences by the mean log-probability of an answer, without a reference.

    torchrun --nproc_per_node=N -m rlite.trainer.simpo actor.model_name=MODEL data.path=pairs.jsonl data.max_length=2048

It is `rlite dpo` with the defaults of `SimpoConfig`. A row of data holds `chosen` and `rejected` answers to a `prompt`
or to `messages`.
"""

from __future__ import annotations

from rlite.assembly.command import run_module
from rlite.assembly.presets import SimpoConfig

if __name__ == "__main__":  # before the imports of this file, which load torch
    run_module("simpo", SimpoConfig)

from rlite.trainer.dpo import DpoTrainer


class SimpoTrainer(DpoTrainer):
    """Trainer on preference pairs with the defaults of SimPO."""

    name = "simpo"
    config_class = SimpoConfig


main = SimpoTrainer.main
