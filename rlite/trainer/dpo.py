"""Direct preference optimisation, and the losses of its family.

    torchrun --nproc_per_node=N -m rlite.trainer.dpo actor.model_name=MODEL data.path=pairs.jsonl data.max_length=2048

A row of data holds `chosen` and `rejected` answers to a `prompt` or to `messages`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorDict

import rlite
from rlite import config
from rlite.algorithms import check_preference_loss
from rlite.data.preferences import preference_rows
from rlite.data.tokens import TokenRows
from rlite.engine.train import RliteTrainEngine
from rlite.errors import ConfigError, UnknownOptionError
from rlite.observability import stats_tracker
from rlite.trainer.losses import DpoLoss, OwnLogprobs
from rlite.trainer.modules import policy_module
from rlite.trainer.options import DataOptions, LaunchOptions, ModelOptions, TestDataOptions
from rlite.trainer.rl.engines import init_devices, untrained
from rlite.trainer.run.command import run
from rlite.trainer.supervised import EpochOptions, SupervisedRun, num_steps, read_tokens, serve_if_worker

SHOWN = ("loss", "accuracy", "margin", "test_loss", "test_accuracy", "grad_norm", "lr", "tokens_per_second", "seconds")


@dataclass(frozen=True, kw_only=True)
class PreferenceLossOptions:
    """A loss of DPO's family."""

    name: str = "sigmoid"
    """of rlite.algorithms.PREFERENCE_LOSSES: sigmoid, ipo, hinge, robust, sppo, apo_zero, apo_down, exo, ..."""
    options: dict[str, Any] = field(default_factory=dict)
    """of that loss, such as {label_smoothing: 0.1}"""
    length_normalised: bool = False
    """log-probabilities are means over the answer's tokens instead of sums"""

    def __post_init__(self) -> None:
        try:
            check_preference_loss(self.name, self.options)
        except UnknownOptionError as error:
            raise ConfigError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class DpoActorOptions(ModelOptions):
    """The policy that learns to prefer."""

    lr: float = 5e-7
    """peak learning rate of AdamW"""
    beta: float = 0.1
    """strength of the tie to the reference"""
    preference_loss: PreferenceLossOptions = field(default_factory=PreferenceLossOptions)
    """what is minimised"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0:
            raise ConfigError(f"actor.beta={self.beta}: expected more than 0")


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
    """The model that the policy is compared with; what is not set is the actor's."""

    model_name: str | None = None
    """folder or hub name of a Hugging Face checkpoint; default: the actor's, before training. With actor.lora, and if
    nothing else is set here, that is the actor itself with its adapters switched off"""
    use_liger_kernel: bool | None = None
    """RMSNorm, rotary embedding and SwiGLU as Triton kernels (package liger-kernel); default: as the actor's"""
    offload_model: bool = False
    """leave the device while the actor trains"""


@dataclass(frozen=True, kw_only=True)
class DpoTrainerOptions(EpochOptions):
    """Where the run lives."""

    save_dir: str = "runs/dpo"
    """holds config.yaml, metrics.jsonl, latest/ (Hugging Face) and state/ (to resume from)"""


@dataclass(frozen=True, kw_only=True)
class DpoConfig(LaunchOptions):
    """Everything that a run is made of."""

    actor: DpoActorOptions
    data: DataOptions
    ref_actor: ReferenceOptions = field(default_factory=ReferenceOptions)
    test_data: TestDataOptions = field(default_factory=TestDataOptions)
    trainer: DpoTrainerOptions = field(default_factory=DpoTrainerOptions)

    def __post_init__(self) -> None:
        if self.actor.avg_level != "token":
            raise ConfigError(f"actor.avg_level={self.actor.avg_level}: this loss is a mean over pairs; leave it out")


class DpoTrainer:
    """Raises what was chosen above what was rejected, relative to a reference.

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
            loss=chosen.name, options=chosen.options, beta=actor.beta, is_length_normalised=chosen.length_normalised
        )
        self.options = options
        self.run = SupervisedRun(options, "actor", options.data, options.trainer, engine, loss, rows, test_rows, SHOWN)
        own = options.ref_actor.model_name or actor.model_name
        is_plain = options.ref_actor in (ReferenceOptions(), ReferenceOptions(model_name=actor.model_name))
        self.is_base_reference = actor.lora is not None and is_plain
        """whether the reference is the actor without its adapters"""
        self.reference = engine if self.is_base_reference else RliteTrainEngine(policy_module(own))

    def fit(self) -> dict[str, float]:
        """Train to the last step; returns the last metrics."""
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
        options = untrained(self.run.build_options, rlite.current_session().device)
        options["use_liger_kernel"] = own.use_liger_kernel
        self.reference.build(**options, colocate_with=self.run.engine)
        if self.options.ref_actor.offload_model:
            self.reference.cpu()

    @stats_tracker.record_timing("reference")
    def with_reference(self, batch: TensorDict) -> TensorDict:
        """Add `ref_logprobs` [N, L], each token's under the reference."""
        if self.options.ref_actor.offload_model:
            self.reference.cuda()
        batch["ref_logprobs"] = self.reference.forward(batch, OwnLogprobs(), without_adapters=self.is_base_reference)
        if self.options.ref_actor.offload_model:
            self.reference.cpu()
        return batch


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
