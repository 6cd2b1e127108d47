"""Reward models from preference pairs (Bradley-Terry).

    torchrun --nproc_per_node=N -m rlite.trainer.rm critic.model_name=MODEL data.path=pairs.jsonl data.max_length=2048

A row of data holds `chosen` and `rejected` answers to a `prompt` or to `messages`, and perhaps a `margin`.
"""

from __future__ import annotations

from rlite.assembly.command import run_module
from rlite.trainer.supervised_options import RmConfig

if __name__ == "__main__":  # before the imports of this file, which load torch
    run_module("rm", RmConfig)


from typing import Any

from rlite.data.tokens import TokenRows
from rlite.errors import ConfigError
from rlite.nn.pretrained import load_tokenizer, padding_token
from rlite.trainer.losses import RewardModelLoss
from rlite.trainer.model.modules import critic_module
from rlite.trainer.supervised import PairTrainer


class RmTrainer(PairTrainer[RmConfig]):
    """Trainer of a reward model that scores the chosen answer above the rejected one.

    Its rows are pairs (`rlite.data.sft.preference_rows`).
    """

    name, key = "rm", "critic"
    config_class = RmConfig
    module = critic_module

    def __init__(self, options: RmConfig, rows: TokenRows, *args: Any, **further: Any) -> None:
        super().__init__(options, rows, *args, **further)
        module: Any = self.engine.module
        name = options.critic.model_name
        module.row_ends = rows.last_tokens
        if padding_token(load_tokenizer(name), module.config.get_text_config().vocab_size, rows.last_tokens) is None:
            raise ConfigError(
                f"critic.model_name={name}: rows end with every special token of its tokenizer, so transformers would "
                "take the end of a row for padding and score the token before it. Add a pad token to the tokenizer"
            )

    def make_loss(self) -> RewardModelLoss:
        """Return the Bradley-Terry loss."""
        return RewardModelLoss(center_coefficient=self.options.critic.center_coefficient)

    def describe_loss(self) -> str:
        """Return the loss in words."""
        centre = self.options.critic.center_coefficient
        return f"Bradley-Terry{f', centred with coefficient {centre:g}' if centre else ''}"


main = RmTrainer.main
