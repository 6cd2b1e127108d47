"""Options of trainers under the names of algorithms: another trainer's options with other defaults. No torch here."""

from __future__ import annotations

from typing import ClassVar

from rlite.config import FinitePositive, Rate, quick_checks
from rlite.errors import ConfigError
from rlite.trainer.options import TrainerOptions
from rlite.trainer.rl.distillation_options import DistillationOptions
from rlite.trainer.rl.options import ActorOptions, AdvantageOptions, KlOptions, PpoConfig, PromptOptions
from rlite.trainer.supervised_options import DpoActorOptions, DpoConfig, EpochOptions, PreferenceLossOptions
from rlite.types import Aggregation

with quick_checks():  # the others import torch; a run makes them
    ORPO_LOSS = PreferenceLossOptions(name="orpo", length_normalised=True, reference_free=True, nll_weight=1.0)
    SIMPO_LOSS = PreferenceLossOptions(name="simpo", length_normalised=True, reference_free=True)
    CPO_LOSS = PreferenceLossOptions(reference_free=True, nll_weight=1.0)


class OrpoActorOptions(DpoActorOptions):
    """The policy of ORPO (arXiv:2403.07691), which also learns the chosen answers by imitation."""

    lr: Rate = 8e-6
    """peak learning rate"""
    beta: FinitePositive = 0.1
    """weight of the odds-ratio loss, lambda in the paper"""
    preference_loss: PreferenceLossOptions = ORPO_LOSS
    """the odds ratio, and the negative log-likelihood of the chosen answer"""


class OrpoConfig(DpoConfig):
    """Options of `rlite orpo`."""

    preset_of: ClassVar[str] = "dpo"

    actor: OrpoActorOptions
    trainer: EpochOptions = EpochOptions(save_dir="runs/orpo")


class SimpoActorOptions(DpoActorOptions):
    """The policy of SimPO (arXiv:2405.14734)."""

    beta: FinitePositive = 2.0
    """factor of the mean log-probability, which is the reward"""
    preference_loss: PreferenceLossOptions = SIMPO_LOSS
    """the loss to minimise; the margin of SimPO is options.gamma=1"""


class SimpoConfig(DpoConfig):
    """Options of `rlite simpo`."""

    preset_of: ClassVar[str] = "dpo"

    actor: SimpoActorOptions
    trainer: EpochOptions = EpochOptions(save_dir="runs/simpo")


class CpoActorOptions(DpoActorOptions):
    """The policy of CPO (arXiv:2401.08417), which also learns the chosen answers by imitation."""

    lr: Rate = 1e-6
    """peak learning rate"""
    beta: FinitePositive = 0.1
    """factor of the difference of the log-probabilities"""
    preference_loss: PreferenceLossOptions = CPO_LOSS
    """DPO's loss without a reference, and the negative log-likelihood of the chosen answer"""


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
    """Options of `rlite grpo`: GRPO as in DeepSeekMath (arXiv:2402.03300)."""

    preset_of: ClassVar[str] = "ppo"

    actor: GrpoActorOptions
    kl: KlOptions = KlOptions(type="loss", loss_estimator="k3")
    adv: AdvantageOptions = AdvantageOptions(norm_var=True)
    trainer: TrainerOptions = TrainerOptions(save_dir="runs/grpo")


class DistillConfig(PpoConfig):
    """Options of `rlite distill`: on-policy distillation, by default without rewards."""

    preset_of: ClassVar[str] = "ppo"
    help_example: ClassVar[str] = (
        "actor.model_name=Qwen/Qwen3-0.6B distill.teacher.model_name=Qwen/Qwen3-8B train_data.path=prompts.jsonl"
    )
    help_first: ClassVar[tuple[str, ...]] = (
        *("train_data.path", "test_data.path", "distill.teacher", "distill.direction", "distill.support"),
        *("distill.task_rewards", "train_data.prompts_per_rollout", "train_data.responses_per_prompt"),
        *("rollout.train_sampling_params.max_new_tokens", "actor.lr", "actor.lora", "trainer.total_steps"),
        *("trainer.save_dir", "launcher", "num_devices"),
    )

    distill: DistillationOptions = DistillationOptions(task_rewards=False)
    train_data: PromptOptions = PromptOptions(responses_per_prompt=1)
    trainer: TrainerOptions = TrainerOptions(save_dir="runs/distill")

    def check_complete(self) -> None:
        """Check that the options name a teacher, and prompts."""
        if not self.distill.teacher:
            raise ConfigError("missing: distill.teacher.model_name=CHECKPOINT; run with --help to see every option")
        super().check_complete()
