"""Options of trainers under the names of algorithms: another trainer's options with other defaults. No torch here."""

from __future__ import annotations

from pydantic import Field

from rlite.config import Positive, Rate
from rlite.trainer.options import DpoActorOptions, DpoConfig, EpochOptions, PreferenceLossOptions, TrainerOptions
from rlite.trainer.rl.config import ActorOptions, AdvantageOptions, KlOptions, PpoConfig
from rlite.types import Aggregation


def _orpo_loss() -> PreferenceLossOptions:
    return PreferenceLossOptions(name="orpo", length_normalised=True, reference_free=True, nll_weight=1.0)


def _simpo_loss() -> PreferenceLossOptions:
    return PreferenceLossOptions(options={"margin": 1.0}, length_normalised=True, reference_free=True)


def _cpo_loss() -> PreferenceLossOptions:
    return PreferenceLossOptions(reference_free=True, nll_weight=1.0)


class OrpoActorOptions(DpoActorOptions):
    """The policy of ORPO (arXiv:2403.07691), which also learns the chosen answers by imitation."""

    lr: Rate = 8e-6
    """peak learning rate"""
    beta: Positive = 0.1
    """weight of the odds-ratio loss, lambda in the paper"""
    preference_loss: PreferenceLossOptions = Field(default_factory=_orpo_loss)
    """the loss to minimise"""


class OrpoConfig(DpoConfig):
    """Options of `rlite orpo`."""

    actor: OrpoActorOptions
    trainer: EpochOptions = EpochOptions(save_dir="runs/orpo")


class SimpoActorOptions(DpoActorOptions):
    """The policy of SimPO (arXiv:2405.14734); its gamma is the option `margin` of the loss."""

    beta: Positive = 2.0
    """factor of the mean log-probability, which is the reward"""
    preference_loss: PreferenceLossOptions = Field(default_factory=_simpo_loss)
    """the loss to minimise"""


class SimpoConfig(DpoConfig):
    """Options of `rlite simpo`."""

    actor: SimpoActorOptions
    trainer: EpochOptions = EpochOptions(save_dir="runs/simpo")


class CpoActorOptions(DpoActorOptions):
    """The policy of CPO (arXiv:2401.08417), which also learns the chosen answers by imitation."""

    lr: Rate = 1e-6
    """peak learning rate"""
    beta: Positive = 0.1
    """factor of the difference of the log-probabilities"""
    preference_loss: PreferenceLossOptions = Field(default_factory=_cpo_loss)
    """the loss to minimise"""


class CpoConfig(DpoConfig):
    """Options of `rlite cpo`."""

    actor: CpoActorOptions
    trainer: EpochOptions = EpochOptions(save_dir="runs/cpo")


class GrpoActorOptions(ActorOptions):
    """The policy of GRPO."""

    avg_level: Aggregation = "sequence"
    """mean of the loss over: all tokens; sequences' means; tokens divided by a constant length (Dr. GRPO's paper). A
    sequence is a row: a trajectory of several rows has as many means, not one"""


class GrpoConfig(PpoConfig):
    """Options of `rlite grpo`: GRPO as DeepSeekMath has it (arXiv:2402.03300)."""

    actor: GrpoActorOptions
    kl: KlOptions = KlOptions(type="loss", loss_estimator="k3")
    adv: AdvantageOptions = AdvantageOptions(norm_var=True)
    trainer: TrainerOptions = TrainerOptions(save_dir="runs/grpo")
