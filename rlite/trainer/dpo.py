"""Direct preference optimisation, and the losses of its family.

    torchrun --nproc_per_node=N -m rlite.trainer.dpo actor.model_name=MODEL data.path=pairs.jsonl data.max_length=2048

A row of data holds `chosen` and `rejected` answers to a `prompt` or to `messages`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tensordict import TensorDict

import rlite
from rlite import config
from rlite.batch import with_keys
from rlite.data.preferences import preference_rows
from rlite.data.tokens import TokenRows
from rlite.engine.train import RliteTrainEngine
from rlite.observability import stats_tracker
from rlite.trainer.losses import DpoLoss, OwnLogprobs
from rlite.trainer.modules import policy_module
from rlite.trainer.options import DpoConfig
from rlite.trainer.rl.engines import frozen_build_options, init_devices
from rlite.trainer.run.command import run
from rlite.trainer.supervised import SupervisedRun, num_steps, read_tokens, serve_if_worker

SHOWN = ("loss", "accuracy", "margin", "test_loss", "test_accuracy", "grad_norm", "lr", "tokens_per_second", "seconds")


class DpoTrainer:
    """Trainer of a policy that prefers the chosen answer to the rejected one, relative to a reference.

    Needs a session: call `rlite.init()` first.

    Args:
        options: the run's config.
        rows: pairs of token rows (`rlite.data.preferences.preference_rows`).
        test_rows: pairs to evaluate on.
    """

    def __init__(self, options: DpoConfig, rows: TokenRows, test_rows: TokenRows | None = None) -> None:
        actor, chosen = options.actor, options.actor.preference_loss
        engine = RliteTrainEngine(
            policy_module(
                actor.model_name, actor.optimizer(num_steps(options, rows)), actor.lora, actor.disable_dropout
            )
        )
        loss = DpoLoss(
            loss=chosen.name,
            options=chosen.options,
            beta=actor.beta,
            is_length_normalised=chosen.length_normalised,
            divergence=chosen.divergence,
            tail_weight=chosen.tail_weight,
        )
        self.options = options
        self.run = SupervisedRun(options, "actor", options.data, options.trainer, engine, loss, rows, test_rows, SHOWN)
        reference = options.ref_actor
        own = reference.model_name or actor.model_name
        is_plain = own == actor.model_name and reference.use_liger_kernel is None and not reference.offload_model
        self.is_base_reference = actor.lora is not None and is_plain
        """the reference is the actor without its adapters"""
        self.reference = engine if self.is_base_reference else RliteTrainEngine(policy_module(own))

    def fit(self) -> dict[str, float]:
        """Train to the last step.

        Returns:
            The metrics of the last step.
        """
        run, metrics = self.run, {}
        run.start("rlite dpo")
        self.build_reference()
        for batch in run.batches():
            with stats_tracker.record_timing("step"):
                batch = self.with_reference(batch)
                stats = run.train_batch(batch)
            metrics = run.finish_step(stats, self.with_reference)
        run.close()
        return metrics

    def build_reference(self) -> None:
        """Place the reference beside the actor, if it is a model of its own."""
        if self.is_base_reference:
            return
        own = config.inherit(self.options.ref_actor, self.options.actor)
        options = frozen_build_options(self.run.build_options, rlite.current_session().device)
        options["use_liger_kernel"] = own.use_liger_kernel
        self.reference.build(**options, colocate_with=self.run.engine)
        if self.options.ref_actor.offload_model:
            self.reference.cpu()

    @stats_tracker.record_timing("reference")
    def with_reference(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `ref_logprobs` [N, L], the reference's log-probability of each token."""
        if self.options.ref_actor.offload_model:
            self.reference.cuda()
        logprobs = self.reference.forward(batch, OwnLogprobs(), without_adapters=self.is_base_reference)
        if self.options.ref_actor.offload_model:
            self.reference.cpu()
        return with_keys(batch, ref_logprobs=logprobs)


def main(argv: Sequence[str]) -> None:
    """Run the trainer from the command line."""
    options = config.load(DpoConfig, argv)
    serve_if_worker(options)
    train_rows, test_rows = read_tokens(options, options.actor.model_name, preference_rows)
    init_devices(options.launcher, options.num_devices)
    DpoTrainer(options, train_rows, test_rows).fit()
    rlite.shutdown()


if __name__ == "__main__":
    run("dpo", main, sys.argv[1:])
