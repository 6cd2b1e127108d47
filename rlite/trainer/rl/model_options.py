"""Options of the models of reinforcement learning: the policy, and the models beside it; schedules. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import Field, Strict

import rlite
from rlite import config
from rlite.config import ByMemory, Count, Finite, FinitePositive, Natural, Options, Positive, Rate, Share
from rlite.generation import LARGEST, SMALLEST
from rlite.nn.options import LoraOptions
from rlite.registry import algorithms
from rlite.trainer.model.options import (
    FrozenModelOptions,
    ModelOptions,
    OptimizerName,
    ParameterGroupOptions,
    schedule_problems,
)
from rlite.types import Aggregation, RoutingSource, Schedule

Weight = Annotated[float, Ge(0)]


class PolicyLossOptions(Options):
    """The function of log-probabilities and advantages that is minimised."""

    name: str = "ppo_clip"
    """a name of `rlite.algorithms.POLICY_LOSSES`: ppo_clip, cispo, clip_cov, decoupled_ppo, dppo, dro, gmpo, gspo,
    kl_cov, m2po, reinforce, sapo, vespo"""
    options: dict[str, Any] = {}
    """keyword parameters of that loss; ppo_clip has its range from actor.clip"""

    def problems(self) -> Iterator[str]:
        """Yield a message for an unknown loss; raise ConfigError or UnknownOptionError for options that it refuses."""
        if self.name in (known := algorithms("policy loss")):
            known.check(self.name, self.options)
        else:
            yield f"name={self.name}: {known.unknown(self.name)}"


class ActorOptions(ModelOptions):
    """The policy that is trained."""

    lr: Rate = 1e-6
    """peak learning rate"""
    max_inference_length_per_device: Count | None = None
    """tokens of one microbatch in passes that train nothing; default: max_length_per_device"""
    scheduler: Schedule = "constant"
    """schedule of the learning rate after the warm-up"""
    warmup_ratio: Share = 0.0
    """share of all optimizer steps in which the rate rises"""
    update_per_rollout: Count = 1
    """optimizer steps on each rollout batch, the critic's too"""
    freeze_steps: Natural = 0
    """first steps in which only the critic learns"""
    clip: Weight = 0.2
    """PPO's clip range below 1 (and above, unless clip_high says otherwise)"""
    clip_high: Weight | None = None
    """clip range above 1"""
    policy_loss: PolicyLossOptions = Field(default_factory=PolicyLossOptions)
    """the loss of each token"""
    tis_coef: Positive | None = 2.0
    """cap of the importance weight trainer / engine; null is off"""
    rejection: dict[str, Any] = {}
    """keyword parameters of `rlite.algorithms.rejection_mask`, such as {upper: 0.02, scope: sequence}: tokens that the
    engine sampled too far from the trainer's policy have no loss; {} rejects nothing"""
    off_policy_threshold: Finite | None = None
    """drop tokens with a negative advantage in sequences with mean(log engine - log trainer) above it; null is off"""
    off_policy_metrics: bool = False
    """report off_policy/*, the distance of the trainer's policy from the engine's; with update_per_rollout=1 it takes
    another forward pass"""
    deterministic: bool = False
    """log-probabilities in training have the bits of the sampled ones; needs rollout.deterministic, slower"""
    routing_replay: RoutingSource = "auto"
    """experts with which a mixture of experts is trained: "rollout" replays those that the engine chose, "old_policy"
    those of the trainer's own pass before the updates, "off" chooses anew; "auto" is rollout if the engine returns
    them, else off"""
    entropy_coef: Finite = 0.0
    """weight of the entropy bonus"""
    temperature: FinitePositive | None = None
    """temperature of the log-probabilities that are trained; default: the temperature of sampling"""
    offload_model: bool | None = None
    """leave the device to generation and to other models; default: on GPUs"""

    def problems(self) -> Iterator[str]:
        """Yield a message for each rule between lengths, adapters and the schedule that does not hold."""
        yield from super().problems()
        longest = self.max_inference_length_per_device
        if longest is not None and longest < self.max_length_per_device:
            expected = f"expected at least max_length_per_device={self.max_length_per_device}"
            yield f"max_inference_length_per_device={longest}: {expected}"
        if self.lora is not None and self.lora.dropout:
            why = "the policy that is trained would not be the one that answered; use 0"
            yield f"lora.dropout={self.lora.dropout}: {why}"

    def slow_problems(self) -> Iterator[str]:
        """Yield nothing; raise ConfigError or UnknownOptionError for a rejection that cannot be computed."""
        rlite.algorithms.check_rejection(self.rejection)
        yield from ()

    def build_options(self, world_size: int, seed: int) -> dict[str, Any]:
        """Return the keywords of `RliteTrainEngine.build`; see `ModelOptions.build_options`."""
        return super().build_options(world_size, seed) | ({"deterministic": True} if self.deterministic else {})


Step = Annotated[int, Strict(False), Ge(1)]
"""number of a step; the command line and JSON give texts"""


class ScheduleOptions(Options):
    """Values of coefficients by step, such as {1: 0.01, 500: 0}: straight lines between them, constant outside.

    Steps are numbered from 1, as in metrics.jsonl.
    """

    entropy_coef: dict[Step, Finite] = {}
    """in place of actor.entropy_coef"""
    kl_coef: dict[Step, Rate] = {}
    """in place of kl.coef"""
    clip: dict[Step, Rate] = {}
    """in place of actor.clip; above 1 too, unless there is a clip_high"""
    clip_high: dict[Step, Rate] = {}
    """in place of actor.clip_high"""
    temperature: dict[Step, Annotated[float, Ge(SMALLEST), Le(LARGEST)]] = {}
    """in place of rollout.train_sampling_params.temperature"""


class ReferenceOptions(FrozenModelOptions):
    """A model beside the actor; options that are not set are the actor's."""

    ddp_size: Count | None = None
    """copies of the model; each is sharded over world / ddp_size devices"""
    tp_size: Count | None = None
    """devices that share each matrix (tensor parallel)"""
    sp_size: Count | None = None
    """devices that share the tokens of a sequence (context parallel)"""
    ep_size: Count | None = None
    """devices that share the experts of each layer (expert parallel); 1 for a dense model beside a mixture"""
    max_length_per_device: Count | None = None
    """tokens of one microbatch on a device"""
    max_inference_length_per_device: Count | None = None
    """tokens of one microbatch in passes that train nothing"""

    def as_model(self, actor: ActorOptions) -> ModelOptions:
        """Return the model's options, completed by the actor's. A model that is not trained has no adapters."""
        filled: dict[str, Any] = {**dict(actor), "lora": None, **dict(config.inherit(self, actor))}
        return ModelOptions(**{name: filled[name] for name in ModelOptions.model_fields})

    def inference_length(self, actor: ActorOptions) -> int | None:
        """Return the tokens of one microbatch in passes that train nothing; None is the engine's default."""
        return self.max_inference_length_per_device or actor.max_inference_length_per_device


class CriticOptions(ReferenceOptions):
    """The model of values, which adv.estimator=gae needs; options that are not set are the actor's."""

    model_name: str | None = None
    """folder or hub name of the checkpoint that the critic begins with; default: the actor's, with a new head"""
    gradient_checkpointing: ByMemory | None = None
    """recompute activations in the backward pass; auto: if memory is short"""
    offload_optimizer: ByMemory | None = None
    """keep the optimizer's state in host memory between optimizer steps; auto: if memory is short"""
    avg_level: Aggregation | None = None
    """mean of the value loss, one of the choices of actor.avg_level"""
    router_aux_loss_coef: Rate | None = None
    """factor of the auxiliary loss of a mixture of experts; 0 for a dense model beside a mixture"""
    router_bias_update_rate: Rate | None = None
    """change of the routers' correction biases in each step; 0 for a dense model beside a mixture"""
    optimizer: OptimizerName | None = None
    """one of the choices of actor.optimizer"""
    lr: Rate = 5e-6
    """peak learning rate"""
    weight_decay: Rate | None = None
    """weight decay"""
    parameter_groups: dict[str, ParameterGroupOptions] = {}
    """groups with the options of actor.parameter_groups; they are not inherited, because the critic's parameters have
    other names"""
    max_grad_norm: Positive | None = None
    """global norm to which gradients are clipped"""
    scheduler: Schedule | None = None
    """schedule of the learning rate after the warm-up"""
    warmup_ratio: Share | None = None
    """share of all optimizer steps in which the rate rises"""
    lr_end: Rate = 0.0
    """rate at the last step"""
    power: FinitePositive | None = None
    """exponent of scheduler=polynomial"""
    disable_dropout: bool | None = None
    """train without dropout"""
    lora: LoraOptions | None = None
    """adapters, with the options of actor.lora; the critic's head is trained as a whole"""
    clip: Positive = 0.5
    """largest change of a value since the rollout; infinity is off"""

    def problems(self) -> Iterator[str]:
        """Yield a message for each rule of the kernels and of the schedule that does not hold."""
        yield from super().problems()
        yield from schedule_problems(self.scheduler, self.lr, self.lr_end, self.power)
