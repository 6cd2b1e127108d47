"""Options of trainers under the names of algorithms: another trainer's options with other defaults. No torch here."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rlite.config import Positive, Rate
from rlite.trainer.options import DpoActorOptions, DpoConfig, EpochOptions, PreferenceLossOptions, TrainerOptions
from rlite.trainer.rl.config import ActorOptions, AdvantageOptions, KlOptions, PpoConfig
from rlite.types import Aggregation


class _OfMeans(PreferenceLossOptions):
    """A loss of the answers' mean log-probabilities."""

    length_normalised: bool = True
    """log-probabilities are means over the answer's tokens instead of sums"""
    reference_free: bool = True
    """compare log-probabilities themselves, not their ratios to a reference; no reference is then built"""


class OrpoLossOptions(_OfMeans):
    """ORPO's loss: the odds ratio, and the negative log-likelihood of the chosen answer."""

    name: str = "orpo"
    """a name of rlite.algorithms.PREFERENCE_LOSSES"""
    nll_weight: Rate = 1.0
    """weight of the negative log-likelihood of the chosen answer, the mean over its tokens, which is added"""


class SimpoLossOptions(_OfMeans):
    """SimPO's loss."""

    name: str = "simpo"
    """a name of rlite.algorithms.PREFERENCE_LOSSES; the margin of simpo is options.gamma=1"""


class CpoLossOptions(PreferenceLossOptions):
    """CPO's loss: DPO's without a reference, and the negative log-likelihood of the chosen answer."""

    reference_free: bool = True
    """compare log-probabilities themselves, not their ratios to a reference; no reference is then built"""
    nll_weight: Rate = 1.0
    """weight of the negative log-likelihood of the chosen answer, the mean over its tokens, which is added"""


class OrpoActorOptions(DpoActorOptions):
    """The policy of ORPO (arXiv:2403.07691), which also learns the chosen answers by imitation."""

    lr: Rate = 8e-6
    """peak learning rate"""
    beta: Positive = 0.1
    """weight of the odds-ratio loss, lambda in the paper"""
    preference_loss: OrpoLossOptions = Field(default_factory=OrpoLossOptions)
    """the loss to minimise"""


class OrpoConfig(DpoConfig):
    """Options of `rlite orpo`."""

    preset_of: ClassVar[str] = "dpo"

    actor: OrpoActorOptions
    trainer: EpochOptions = EpochOptions(save_dir="runs/orpo")


class SimpoActorOptions(DpoActorOptions):
    """The policy of SimPO (arXiv:2405.14734)."""

    beta: Positive = 2.0
    """factor of the mean log-probability, which is the reward"""
    preference_loss: SimpoLossOptions = Field(default_factory=SimpoLossOptions)
    """the loss to minimise"""


class SimpoConfig(DpoConfig):
    """Options of `rlite simpo`."""

    preset_of: ClassVar[str] = "dpo"

    actor: SimpoActorOptions
    trainer: EpochOptions = EpochOptions(save_dir="runs/simpo")


class CpoActorOptions(DpoActorOptions):
    """The policy of CPO (arXiv:2401.08417), which also learns the chosen answers by imitation."""

    lr: Rate = 1e-6
    """peak learning rate"""
    beta: Positive = 0.1
    """factor of the difference of the log-probabilities"""
    preference_loss: CpoLossOptions = Field(default_factory=CpoLossOptions)
    """the loss to minimise"""


class CpoConfig(DpoConfig):
    """Options of `rlite cpo`."""

    preset_of: ClassVar[str] = "dpo"

    actor: CpoActorOptions
    trainer: EpochOptions = EpochOptions(save_dir="runs/cpo")


class GrpoActorOptions(ActorOptions):
    """The policy of GRPO."""

    avg_level: Aggregation = "sequence"
    """mean of the loss over: all tokens; sequences' means; tokens divided by a constant length (Dr. GRPO's paper). A
    sequence is a row: a trajectory of several rows has as many means, not one"""


class GrpoConfig(PpoConfig):
    """Options of `rlite grpo`: GRPO as DeepSeekMath has it (arXiv:2402.03300)."""

    preset_of: ClassVar[str] = "ppo"

    actor: GrpoActorOptions
    kl: KlOptions = KlOptions(type="loss", loss_estimator="k3")
    adv: AdvantageOptions = AdvantageOptions(norm_var=True)
    trainer: TrainerOptions = TrainerOptions(save_dir="runs/grpo")
