"""Supervised fine-tuning.

    torchrun --nproc_per_node=N -m rlite.trainer.sft actor.model_name=MODEL data.path=rows.json data.max_length=2048
    python -m rlite.trainer.sft ...                     one device
    python -m rlite.trainer.sft launcher=ray ...

A row of data holds `prompt` and `response`, or `messages`, of which every turn of the assistant is learnt.
"""

from __future__ import annotations

import sys

from rlite.trainer.options import SftConfig
from rlite.trainer.run.command import start

if __name__ == "__main__":  # before the imports of this file, which load torch
    start("sft", "rlite.trainer.sft", SftConfig, sys.argv[1:])
    sys.exit()


from rlite.data.sft import sft_rows
from rlite.trainer.losses import SftLoss
from rlite.trainer.supervised import SupervisedTrainer


class SftTrainer(SupervisedTrainer[SftConfig]):
    """Trainer on demonstrations (`rlite.data.sft.sft_rows`), by cross entropy."""

    name = "sft"
    config_class = SftConfig
    tokenise = sft_rows
    kind = "demonstrations"
    shown = ("loss", "test_loss", "seconds", "tokens_per_second", "lr", "grad_norm", "num_tokens")

    def make_loss(self) -> SftLoss:
        """Return the cross entropy."""
        return SftLoss(avg_level=self.options.actor.avg_level)

    def describe_loss(self) -> str:
        """Return the loss in words."""
        return f"cross entropy, mean per {self.options.actor.avg_level}"


main = SftTrainer.main
