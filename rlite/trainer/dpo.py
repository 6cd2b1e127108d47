"""Direct preference optimisation, and the losses of its family.

    torchrun --nproc_per_node=N -m rlite.trainer.dpo actor.model_name=MODEL data.path=pairs.jsonl data.max_length=2048

A row of data holds `chosen` and `rejected` answers to a `prompt` or to `messages`.
"""

from __future__ import annotations

import sys

from rlite.trainer.options import DpoConfig
from rlite.trainer.run.command import start

if __name__ == "__main__":  # before the imports of this file, which load torch
    start("dpo", "rlite.trainer.dpo", DpoConfig, sys.argv[1:])
    sys.exit()

from collections.abc import Sequence

from tensordict import TensorDict

import rlite
from rlite import config
from rlite.batch import with_keys
from rlite.data.preferences import preference_rows
from rlite.data.tokens import TokenRows
from rlite.engine.train import RliteTrainEngine
from rlite.observability import stats_tracker
from rlite.trainer.callbacks import Callback
from rlite.trainer.losses import DpoLoss, OwnLogprobs
from rlite.trainer.modules import policy_module
from rlite.trainer.options import frozen_build_options
from rlite.trainer.supervised import SHOWN_OF_PAIRS, SupervisedTrainer


class DpoTrainer(SupervisedTrainer[DpoConfig]):
    """Trainer of a policy that prefers the chosen answer to the rejected one, relative to a reference.

    Its rows are pairs (`rlite.data.preferences.preference_rows`).
    """

    name = "dpo"
    config_class = DpoConfig
    tokenise = preference_rows
    shown = SHOWN_OF_PAIRS

    def __init__(
        self,
        options: DpoConfig,
        rows: TokenRows,
        test_rows: TokenRows | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        super().__init__(options, rows, test_rows, callbacks)
        actor, reference = options.actor, options.ref_actor
        own = reference.model_name or actor.model_name
        is_plain = own == actor.model_name and reference.use_liger_kernel is None and not reference.offload_model
        self.is_base_reference = actor.lora is not None and is_plain
        """the reference is the actor without its adapters"""
        self.reference = self.engine if self.is_base_reference else RliteTrainEngine(policy_module(own))

    def make_loss(self) -> DpoLoss:
        """Return the loss of the DPO family that the options name."""
        return DpoLoss(beta=self.options.actor.beta, preference_loss=self.options.actor.preference_loss)

    def start(self) -> None:
        """Begin as every trainer does, then place the reference beside the actor, if it is a model of its own."""
        super().start()
        if self.is_base_reference:
            return
        own = config.inherit(self.options.ref_actor, self.options.actor)
        options = frozen_build_options(self.build_options, rlite.current_session().device)
        options["use_liger_kernel"] = own.use_liger_kernel
        self.reference.build(**options, colocate_with=self.engine)
        if self.options.ref_actor.offload_model:
            self.reference.cpu()

    @stats_tracker.record_timing("reference")
    def prepare(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `ref_logprobs` [N, L], the reference's log-probability of each token."""
        if self.options.ref_actor.offload_model:
            self.reference.cuda()
        logprobs = self.reference.forward(batch, OwnLogprobs(), without_adapters=self.is_base_reference)
        if self.options.ref_actor.offload_model:
            self.reference.cpu()
        return with_keys(batch, ref_logprobs=logprobs)


main = DpoTrainer.main
