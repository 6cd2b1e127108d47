"""Supervised fine-tuning.

    torchrun --nproc_per_node=N -m rlite.trainer.sft actor.model_name=MODEL data.path=rows.json data.max_length=2048
    python -m rlite.trainer.sft ...                     one device
    python -m rlite.trainer.sft launcher=ray ...

A row of data holds `prompt` and `response`, or `messages`, of which every turn of the assistant is learnt.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import rlite
from rlite import config
from rlite.data.sft import sft_rows
from rlite.data.tokens import TokenRows
from rlite.engine.train import RliteTrainEngine
from rlite.observability import stats_tracker
from rlite.trainer.losses import SftLoss
from rlite.trainer.modules import policy_module
from rlite.trainer.options import SftConfig
from rlite.trainer.rl.engines import init_devices
from rlite.trainer.run.command import run
from rlite.trainer.supervised import SupervisedRun, num_steps, read_tokens, serve_if_worker

SHOWN = ("loss", "test_loss", "grad_norm", "lr", "num_tokens", "tokens_per_second", "seconds")


class SftTrainer:
    """Trainer on demonstrations, by cross entropy.

    Needs a session: call `rlite.init()` first.

    Args:
        options: the run's config.
        rows: token rows to learn (`rlite.data.sft.sft_rows`).
        test_rows: token rows to evaluate on.
    """

    def __init__(self, options: SftConfig, rows: TokenRows, test_rows: TokenRows | None = None) -> None:
        actor = options.actor
        engine = RliteTrainEngine(
            policy_module(
                actor.model_name, actor.optimizer(num_steps(options, rows)), actor.lora, actor.disable_dropout
            )
        )
        loss = SftLoss(avg_level=options.actor.avg_level)
        self.run = SupervisedRun(options, "actor", options.data, options.trainer, engine, loss, rows, test_rows, SHOWN)

    def fit(self) -> dict[str, float]:
        """Train to the last step.

        Returns:
            The metrics of the last step.
        """
        run, metrics = self.run, {}
        run.start("rlite sft")
        for batch in run.batches():
            with stats_tracker.record_timing("step"):
                stats = run.train_batch(batch)
            metrics = run.finish_step(stats)
        run.close()
        return metrics


def main(argv: Sequence[str]) -> None:
    """Run the trainer from the command line."""
    options = config.load(SftConfig, argv)
    serve_if_worker(options)
    train_rows, test_rows = read_tokens(options, options.actor.model_name, sft_rows)
    init_devices(options.launcher, options.num_devices)
    SftTrainer(options, train_rows, test_rows).fit()
    rlite.shutdown()


if __name__ == "__main__":
    run("sft", main, sys.argv[1:])
