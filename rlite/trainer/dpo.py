"""Direct preference optimisation, and the losses of its family.

    torchrun --nproc_per_node=N -m rlite.trainer.dpo actor.model_name=MODEL data.path=pairs.jsonl data.max_length=2048

A row of data holds `chosen` and `rejected` answers to a `prompt` or to `messages`. ORPO, SimPO and CPO have commands of
their own: this trainer with other defaults, and without a reference.
"""

from __future__ import annotations

from rlite.assembly.command import run_module
from rlite.trainer.supervised_options import DpoConfig

if __name__ == "__main__":  # before the imports of this file, which load torch
    run_module("dpo", DpoConfig)

from tensordict import TensorDict

from rlite.data.packs import with_keys
from rlite.observability import stats_tracker
from rlite.trainer.losses import DpoLoss
from rlite.trainer.model.modules import Reference
from rlite.trainer.supervised import PairTrainer


class DpoTrainer(PairTrainer[DpoConfig]):
    """Trainer of a policy that prefers the chosen answer to the rejected one, relative to a reference.

    Its rows are pairs (`rlite.data.sft.preference_rows`).
    """

    name = "dpo"
    config_class: type[DpoConfig] = DpoConfig

    def make_reference(self) -> Reference | None:
        """Return the reference model, unless the loss has none."""
        actor = self.options.actor
        return None if actor.preference_loss.reference_free else Reference(self.options.ref_actor, actor, self.engine)

    def make_loss(self) -> DpoLoss:
        """Return the loss of the DPO family that the options name."""
        return DpoLoss(beta=self.options.actor.beta, preference_loss=self.options.actor.preference_loss)

    def describe_loss(self) -> str:
        """Return the loss in words, with its strength and its reference."""
        actor, loss = self.options.actor, self.options.actor.preference_loss
        means = ["means over tokens"] if loss.length_normalised else []
        imitation = [f"{loss.nll_weight:g} x imitation of the chosen answers"] if loss.nll_weight else []
        reference = "no reference" if self.reference is None else self.reference.describe()
        return ", ".join([f"{loss.name}, beta {actor.beta:g}", *means, *imitation, reference])

    def prepare(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `ref_logprobs` [N, L], the reference's log-probability of each token, if there is one."""
        if self.reference is None:
            return batch
        with stats_tracker.record_timing("reference"):
            [logprobs] = self.reference.logprobs(batch)
        return with_keys(batch, ref_logprobs=logprobs)


main = DpoTrainer.main
