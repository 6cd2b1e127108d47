"""Reward models from preference pairs (Bradley-Terry).

    torchrun --nproc_per_node=N -m rlite.trainer.rm critic.model_name=MODEL data.path=pairs.jsonl data.max_length=2048

A row of data holds `chosen` and `rejected` answers to a `prompt` or to `messages`, and perhaps a `margin`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import rlite
from rlite import config
from rlite.data.preferences import preference_rows
from rlite.data.tokens import TokenRows
from rlite.engine.train import RliteTrainEngine
from rlite.observability import stats_tracker
from rlite.trainer.losses import RewardModelLoss
from rlite.trainer.modules import critic_module
from rlite.trainer.options import RmConfig
from rlite.trainer.rl.engines import init_devices
from rlite.trainer.run.command import run
from rlite.trainer.supervised import SupervisedRun, num_steps, read_tokens, serve_if_worker

SHOWN = ("loss", "accuracy", "margin", "test_loss", "test_accuracy", "grad_norm", "lr", "tokens_per_second", "seconds")


class RmTrainer:
    """Trainer of a reward model that scores the chosen answer above the rejected one.

    Needs a session: call `rlite.init()` first.

    Args:
        options: the run's config.
        rows: pairs of token rows (`rlite.data.preferences.preference_rows`).
        test_rows: pairs to evaluate on.
    """

    def __init__(self, options: RmConfig, rows: TokenRows, test_rows: TokenRows | None = None) -> None:
        critic = options.critic
        engine = RliteTrainEngine(
            critic_module(
                critic.model_name, critic.optimizer(num_steps(options, rows)), critic.lora, critic.disable_dropout
            )
        )
        loss = RewardModelLoss(center_coefficient=critic.center_coefficient)
        self.run = SupervisedRun(options, "critic", options.data, options.trainer, engine, loss, rows, test_rows, SHOWN)

    def fit(self) -> dict[str, float]:
        """Train to the last step.

        Returns:
            The metrics of the last step.
        """
        run, metrics = self.run, {}
        run.start("rlite rm")
        for batch in run.batches():
            with stats_tracker.record_timing("step"):
                stats = run.train_batch(batch)
            metrics = run.finish_step(stats)
        run.close()
        return metrics


def main(argv: Sequence[str]) -> None:
    """Run the trainer from the command line."""
    options = config.load(RmConfig, argv)
    serve_if_worker(options)
    train_rows, test_rows = read_tokens(options, options.critic.model_name, preference_rows)
    init_devices(options.launcher, options.num_devices)
    RmTrainer(options, train_rows, test_rows).fit()
    rlite.shutdown()


if __name__ == "__main__":
    run("rm", main, sys.argv[1:])
