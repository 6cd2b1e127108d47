"""KTO: preferences from single answers, each marked desirable or not.

    torchrun --nproc_per_node=N -m rlite.trainer.kto actor.model_name=MODEL data.path=rows.jsonl data.max_length=2048

A row of data holds a `completion` to a `prompt` or to `messages`, and a `label`: true if the completion is desirable.
"""

from __future__ import annotations

from rlite.assembly.command import run_module
from rlite.trainer.supervised_options import KtoConfig

if __name__ == "__main__":  # before the imports of this file, which load torch
    run_module("kto", KtoConfig)

from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.algorithms import kto_reference_point
from rlite.data.packs import with_keys
from rlite.data.sft import labelled_rows, longest_mismatch, mismatched
from rlite.data.tokens import TokenRows
from rlite.errors import ConfigError
from rlite.observability import stats_tracker
from rlite.trainer.losses import KtoLoss
from rlite.trainer.model.modules import Reference
from rlite.trainer.rl.objective import OwnLogprobs
from rlite.trainer.supervised import SupervisedTrainer

DESIRABLE, UNDESIRABLE = "desirable_rewards", "undesirable_rewards"


class KtoTrainer(SupervisedTrainer[KtoConfig]):
    """Trainer of a policy that makes desirable answers likelier, and the others less likely, than a reference does.

    Its rows are labelled answers (`rlite.data.sft.labelled_rows`).
    """

    name = "kto"
    config_class = KtoConfig
    tokenise = labelled_rows
    kind = "unpaired"
    reference: Reference
    shown = ("loss", DESIRABLE, UNDESIRABLE, "margin", "kl", "grad_norm", "lr", "seconds")

    def make_reference(self) -> Reference:
        """Return the reference model."""
        return Reference(self.options.ref_actor, self.options.actor, self.engine)

    def make_loss(self) -> KtoLoss:
        """Return KTO's loss."""
        actor = self.options.actor
        weights = {"desirable_weight": actor.desirable_weight, "undesirable_weight": actor.undesirable_weight}
        return KtoLoss(beta=actor.beta, **weights)

    def describe_loss(self) -> str:
        """Return the loss in words, with its strength and its reference."""
        actor = self.options.actor
        weights = f"weights {actor.desirable_weight:g} (desirable) and {actor.undesirable_weight:g} (undesirable)"
        return f"{actor.loss_type}, beta {actor.beta:g}, {weights}, {self.reference.describe()}"

    def _check_rows(self, model: tuple[int, int | None], capacity: int, name: str, table: str, rows: TokenRows) -> None:
        """Check that every item fits the devices, and every prompt with another row's answer."""
        super()._check_rows(model, capacity, name, table, rows)
        limit = self.options.data.max_length
        longest = limit if self.rows.stream is not None else min(limit, longest_mismatch(rows))
        if self.options.actor.loss_type == "kto" and longest > capacity:
            raise ConfigError(
                f"KTO's reference point reads prompts with answers of other rows of {table}, up to {longest} tokens, "
                f"and {name} is {capacity}; raise that, or lower data.max_length, to which they are cut"
            )

    def prepare(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `ref_logprobs` [N, L] and `reference_point` [N].

        The reference point is one number for the whole batch, computed before the update. It does not depend on the
        division of the batch into packs and over devices, up to rounding.
        """
        shifted = mismatched(batch, self.options.data.max_length) if self.options.actor.loss_type == "kto" else None
        with stats_tracker.record_timing("reference"):
            logprobs, *others = self.reference.logprobs(*([batch] if shifted is None else [batch, shifted]))
        point = torch.zeros(())
        if shifted is not None:
            with stats_tracker.record_timing("kl"):
                own = self.engine.forward(shifted, OwnLogprobs())
            point = kto_reference_point(_sums(own, shifted), _sums(others[0], shifted))
        return with_keys(batch, ref_logprobs=logprobs, reference_point=point.float().expand(len(batch)).clone())

    def update(self, batch: TensorDict) -> dict[str, float]:
        """Make one optimizer step and one step of the learning rate.

        Returns the batch's statistics. Without rows of a label, there is no reward of this label, and no margin.
        """
        stats, counts = super().update(batch), self.metric_counts(batch)
        return _with_margin({key: value for key, value in stats.items() if counts.get(key, 1)})

    def metric_counts(self, batch: TensorDict) -> dict[str, float]:
        """Return the numbers of desirable and of undesirable answers, over which their rewards are means."""
        num_desirable = int(batch["is_desirable"].sum())
        return {DESIRABLE: float(num_desirable), UNDESIRABLE: float(len(batch) - num_desirable)}

    def evaluate(self, rows: TokenRows) -> dict[str, float]:
        """Return means of the loss and its metrics over token rows, as `test_...`."""
        return _with_margin(super().evaluate(rows), "test_")


def _sums(logprobs: Tensor, batch: TensorDict) -> Tensor:
    return (logprobs.double() * batch["loss_mask"]).sum(-1)


def _with_margin(metrics: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    keys = [f"{prefix}{DESIRABLE}", f"{prefix}{UNDESIRABLE}"]
    if not all(key in metrics for key in keys):
        return dict(metrics)
    return {**metrics, f"{prefix}margin": metrics[keys[0]] - metrics[keys[1]]}


main = KtoTrainer.main
