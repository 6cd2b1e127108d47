"""Options of reinforcement learning from rollouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlite import config
from rlite.algorithms import ADVANTAGES, Schedule, check_advantage, check_policy_loss
from rlite.algorithms.advantages import is_of_group_alone
from rlite.algorithms.kl import KLEstimator
from rlite.errors import ConfigError, UnknownOptionError, did_you_mean
from rlite.nn.lora import LoraOptions
from rlite.rollout.collector.ledger import OnStale
from rlite.rollout.collector.options import CollectorOptions
from rlite.trainer.losses import AvgLevel, check_kl_loss
from rlite.trainer.options import LaunchOptions, ModelOptions, check_model_options
from rlite.trainer.run.run import TrainerOptions
from rlite.types import GenerationHyperparameters

SamplingOf = GenerationHyperparameters | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PolicyLossOptions:
    """What turns log-probabilities and advantages into a loss."""

    name: str = "ppo_clip"
    """a name of `rlite.algorithms.POLICY_LOSSES`"""
    options: dict[str, Any] = field(default_factory=dict)
    """of that loss, its keyword parameters; ppo_clip has its range from actor.clip"""

    def __post_init__(self) -> None:
        try:
            check_policy_loss(self.name, self.options)
        except UnknownOptionError as error:
            raise ConfigError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class ActorOptions(ModelOptions):
    """The policy that is trained."""

    lr: float = 1e-6
    """peak learning rate of AdamW"""
    max_inference_length_per_device: int | None = None
    """tokens of one microbatch where nothing is trained; default: max_length_per_device"""
    scheduler: Schedule = "constant"
    """after the warm-up"""
    warmup_ratio: float = 0.0
    """share of all optimizer steps in which the rate rises"""
    update_per_rollout: int = 1
    """optimizer steps on each rollout batch, the critic's too"""
    freeze_steps: int = 0
    """first steps in which only the critic learns"""
    clip: float = 0.2
    """PPO's clip range below 1 (and above, unless clip_high says otherwise)"""
    clip_high: float | None = None
    """clip range above 1"""
    policy_loss: PolicyLossOptions = field(default_factory=PolicyLossOptions)
    """the loss of each token"""
    tis_coef: float | None = 2.0
    """cap of the importance weight trainer / engine; null is off"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus"""
    temperature: float | None = None
    """of the log-probabilities that are trained; default: that of sampling"""
    offload_model: bool | None = None
    """leave the device to generation and to other models; default: on GPUs"""

    def __post_init__(self) -> None:
        super().__post_init__()
        longest = self.max_inference_length_per_device
        if longest is not None and longest < self.max_length_per_device:
            raise ConfigError(
                f"actor.max_inference_length_per_device={longest}: expected at least max_length_per_device="
                f"{self.max_length_per_device}"
            )
        for name, least in (("update_per_rollout", 1), ("freeze_steps", 0), ("clip", 0), ("clip_high", 0)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigError(f"actor.{name}={value}: expected at least {least}")
        if self.tis_coef is not None and not self.tis_coef > 0:
            raise ConfigError(f"actor.tis_coef={self.tis_coef}: expected more than 0, or null")
        if self.lora is not None and self.lora.dropout:
            raise ConfigError(
                f"actor.lora.dropout={self.lora.dropout}: the policy that is trained would not be the one that "
                "answered; use 0"
            )


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
    """A model beside the actor, which stays as it is; what is not set is the actor's."""

    model_name: str | None = None
    """folder or hub name of a Hugging Face checkpoint"""
    ddp_size: int | None = None
    """copies of the model; each is sharded over world / ddp_size devices"""
    tp_size: int | None = None
    """devices that share each matrix (tensor parallel)"""
    sp_size: int | None = None
    """devices that share the tokens of a sequence (context parallel)"""
    max_length_per_device: int | None = None
    """tokens of one microbatch on a device"""
    max_inference_length_per_device: int | None = None
    """tokens of one microbatch where nothing is trained"""
    use_liger_kernel: bool | None = None
    """RMSNorm, rotary embedding and SwiGLU as Triton kernels (package liger-kernel); GPUs only"""
    offload_model: bool | None = None
    """leave the device to the others when it is not used"""

    def __post_init__(self) -> None:
        check_model_options(self)

    def as_model(self, actor: ActorOptions) -> ModelOptions:
        """With what the actor lends."""
        filled = config.inherit(self, actor)
        lent = {f.name: getattr(filled, f.name, getattr(actor, f.name)) for f in dataclasses.fields(ModelOptions)}
        return ModelOptions(**{**lent, "lora": getattr(filled, "lora", None)})  # what is not trained has no adapters


@dataclass(frozen=True, kw_only=True)
class CriticOptions(ReferenceOptions):
    """The model of values, which adv.estimator=gae needs; what is not set is the actor's."""

    gradient_checkpointing: bool | None = None
    """recompute activations in the backward pass"""
    offload_optimizer: bool | None = None
    """keep AdamW's state in host memory between optimizer steps"""
    avg_level: AvgLevel | None = None
    """as actor.avg_level"""
    lr: float = 5e-6
    """peak learning rate of AdamW"""
    weight_decay: float | None = None
    """of AdamW"""
    max_grad_norm: float | None = None
    """global norm to which gradients are clipped"""
    scheduler: Schedule | None = None
    """after the warm-up"""
    warmup_ratio: float | None = None
    """share of all optimizer steps in which the rate rises"""
    lr_end: float = 0.0
    """rate at the last step"""
    power: float | None = None
    """of scheduler=polynomial"""
    disable_dropout: bool | None = None
    """as actor.disable_dropout"""
    lora: LoraOptions | None = None
    """as actor.lora; its head is trained as a whole"""
    clip: float = 0.5
    """how far a value may move from what it was at the rollout; infinity is off"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.clip > 0:
            raise ConfigError(f"critic.clip={self.clip}: expected more than 0; inf is off")


@dataclass(frozen=True, kw_only=True)
class KlOptions:
    """The price of leaving the reference policy."""

    type: Literal["reward", "loss", "advantage"] | None = None
    """where it is paid: of each token's reward, as a term of the loss, or of each token's advantage; null is nowhere"""
    coef: float = 1e-3
    """its weight"""
    reward_estimator: KLEstimator = "k1"
    """of the types reward and advantage"""
    loss_estimator: KLEstimator = "k2"
    """of the type loss: k2, k3 or abs"""

    def __post_init__(self) -> None:
        check_kl_loss(self.loss_estimator)
        if not self.coef >= 0:
            raise ConfigError(f"kl.coef={self.coef}: expected at least 0")


@dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
    """From rewards to advantages."""

    estimator: str = "reinforce"
    """reinforce: reward less the mean of its group; gae: with a critic; or a name of `rlite.algorithms.ADVANTAGES`"""
    options: dict[str, Any] = field(default_factory=dict)
    """of an estimator of ADVANTAGES, its keyword parameters"""
    gamma: float = 1.0
    """discount for each token that the model writes; an outcome is the discounted sum of its trajectory's rewards"""
    lamda: float = 1.0
    """of gae: 1 relies on rewards alone, 0 on values"""
    global_norm: bool = False
    """the mean is that of the whole batch (gae: advantages are centred)"""
    norm_var: bool = False
    """divide by the standard deviation, of the group (GRPO), or with global_norm or gae of the whole batch. With gae it
    centres nothing: that is global_norm"""

    def __post_init__(self) -> None:
        for name in ("gamma", "lamda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"adv.{name}={getattr(self, name)}: expected a number between 0 and 1")
        known = ["reinforce", "gae", *ADVANTAGES]
        if self.estimator not in known:
            raise ConfigError(f"adv.estimator={self.estimator}: {did_you_mean(self.estimator, known)}")
        is_named = self.estimator in ADVANTAGES
        if self.estimator in ("remax", "gdpo"):
            raise ConfigError(f"adv.estimator={self.estimator} needs more rewards than this trainer collects")
        if is_named:
            try:
                check_advantage(self.estimator, self.options)
            except UnknownOptionError as error:
                raise ConfigError(str(error)) from error
        if (self.options and not is_named) or (is_named and (self.global_norm or self.norm_var)):
            raise ConfigError(
                f"adv.estimator={self.estimator}: adv.options are of the estimators in ADVANTAGES, adv.global_norm and "
                "adv.norm_var of reinforce and gae"
            )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How responses are sampled."""

    temperature: float = 1.0
    """0 is greedy"""
    max_new_tokens: int = 1024
    """longest response, in each turn"""
    top_p: float = 1.0
    """1 is off"""
    top_k: int = 0
    """0 is off"""
    stop: list[str] = field(default_factory=list)
    """texts that end a response"""

    def gconfig(self, base: SamplingOf | None = None) -> GenerationHyperparameters:
        """Return these as a request takes them; what they do not say is that of `base`."""
        return GenerationHyperparameters.from_mapping(base).new(
            temperature=self.temperature,
            greedy=self.temperature == 0,
            max_new_tokens=self.max_new_tokens,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=tuple(self.stop),
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationSamplingOptions:
    """How responses are sampled for evaluation; what is not set is as for training."""

    temperature: float = 0.0
    """0 is greedy"""
    max_new_tokens: int | None = None
    """longest response, in each turn"""
    top_p: float = 1.0
    """1 is off"""
    top_k: int = 0
    """0 is off"""
    stop: list[str] | None = None
    """texts that end a response"""


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """The engine that generates, and what rewards it."""

    executor: str = "torch"
    """inference executor"""
    tp_size: int = 1
    """devices that share one replica"""
    dtype: str | None = None
    """of the served weights; default: the checkpoint's"""
    gpu_memory_utilization: float = 0.6
    """share of a GPU's memory for generation"""
    max_num_seqs: int = 256
    """sequences that a replica decodes at once"""
    max_model_len: int | None = None
    """longest prompt and responses together, in tokens; default: what the longest prompt and max_new_tokens need; in
    several turns, or if prompts are not known before, as much as the models and devices can take"""
    deterministic: bool = False
    """the same tokens and log-probabilities, bit by bit, after a resume as without it; executor torch alone, slower"""
    max_head_offpolicyness: int = 0
    """weight updates that may happen between the start of a rollout and its use. 0: rollouts and training take turns on
    all devices; more: they overlap, on devices of their own, and the loss corrects for the difference (tis_coef, or
    policy_loss.name=decoupled_ppo)"""
    num_devices: int | None = None
    """devices that only generate, where rollouts run ahead; default: half of them"""
    max_concurrent_rollouts: int | None = None
    """prompts under way at the same time, where rollouts run ahead; default: prompts_per_rollout"""
    on_stale: OnStale = "wait"
    """rollouts that would get too old: "wait" holds the next batch for them; "drop" drops them, in favour of short
    answers"""
    stale_timeout: float = 600.0
    """seconds since its start after which a batch does not wait for a group that holds it up; the group is dropped"""
    request_timeout: float = 3600.0
    """seconds for one attempt at an episode"""
    request_retries: int = 3
    """further attempts at an episode that raised"""
    max_consecutive_failures: int = 16
    """groups lost to exceptions, next to each other in the order of their start, that end the run"""
    escape_special_tokens: bool = False
    """special tokens in messages, but for the assistant's, are plain text"""
    env_path: str | None = None
    """Python file with `async step(state, action, extra_info)`, which returns the keys in STEP_KEYS of
    rlite.rollout.environments.step;
    or with `make(**env_options)`, which returns a Gym-like environment: then rows have a `seed`, and no prompt"""
    env_timeout: float = 60.0
    """seconds for one step of the environment"""
    env_processes: int | None = None
    """steps of environments that run at the same time; default: the cores, at most 8"""
    env_memory_limit_gib: float | None = None
    """resident memory that an environment's process may have; a step that takes more fails, alone; null: no limit"""
    env_vars: list[str] = field(default_factory=list)
    """names of environment variables that the environment's processes get as well, such as the key of an API: they see
    none of the run's secrets"""
    max_turns: int = 1
    """turns of the model in one episode"""
    dynamic_filtering: bool | None = None
    """replace groups whose rewards are all equal by further prompts; default: where such groups teach nothing, because
    an advantage depends on the rewards of its group alone. Elsewhere it is refused"""
    max_refills: int = 4
    """further rounds of generation for that; what is missing then stays as it is"""
    train_sampling_params: SamplingOptions = field(default_factory=SamplingOptions)
    """sampling for training; a workflow that is given to the trainer brings its own"""
    test_sampling_params: EvaluationSamplingOptions = field(default_factory=EvaluationSamplingOptions)
    """sampling for evaluation; a workflow for evaluation that is given to the trainer brings its own"""

    def __post_init__(self) -> None:
        counts = {"max_head_offpolicyness": 0, "max_refills": 0, "request_retries": 0, "max_consecutive_failures": 1}
        for name, least in counts.items():
            if getattr(self, name) < least:
                raise ConfigError(f"rollout.{name}={getattr(self, name)}: expected at least {least}")
        for name in ("stale_timeout", "request_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"rollout.{name}={getattr(self, name)}: expected more than 0 seconds")
        if self.max_head_offpolicyness and self.deterministic:
            raise ConfigError(
                "rollout.deterministic=true promises the same bits again, which rollouts that run ahead of training "
                f"(rollout.max_head_offpolicyness={self.max_head_offpolicyness}) cannot keep; choose one of them"
            )
        if self.num_devices is not None and not self.max_head_offpolicyness:
            raise ConfigError(
                f"rollout.num_devices={self.num_devices}: without rollout.max_head_offpolicyness generation and "
                "training take turns on all devices; set both or neither"
            )

    @property
    def evaluation_sampling(self) -> SamplingOptions:
        """For evaluation, with what training lends."""
        filled = config.inherit(self.test_sampling_params, self.train_sampling_params)
        return SamplingOptions(**{f.name: getattr(filled, f.name) for f in dataclasses.fields(SamplingOptions)})


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Prompts to train on."""

    path: str | None = None
    """JSON, JSONL, CSV, Parquet or Arrow file, a folder or hub name of a dataset; SPLIT@PATH for a part of it"""
    prompts_per_rollout: int = 32
    """prompts in one rollout batch"""
    responses_per_prompt: int | None = None
    """responses to each prompt, a group; with 1 the batch's mean reward is the baseline; default: 8, with gae 1"""

    def __post_init__(self) -> None:
        for name in ("prompts_per_rollout", "responses_per_prompt"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"train_data.{name}={getattr(self, name)}: expected at least 1")


@dataclass(frozen=True, kw_only=True)
class TestOptions:
    """Prompts to evaluate on."""

    path: str | None = None
    """as train_data.path; null evaluates nothing"""
    max_error_share: float = 0.1
    """share of episodes that may fail in an evaluation; with more it is invalid, and chooses no best model"""

    def __post_init__(self) -> None:
        if not 0 <= self.max_error_share <= 1:
            raise ConfigError(f"test_data.max_error_share={self.max_error_share}: expected a number between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class PpoConfig(LaunchOptions):
    """Everything that a run is made of."""

    actor: ActorOptions
    critic: CriticOptions = field(default_factory=CriticOptions)
    ref_actor: ReferenceOptions = field(default_factory=ReferenceOptions)
    train_data: PromptOptions = field(default_factory=PromptOptions)
    test_data: TestOptions = field(default_factory=TestOptions)
    kl: KlOptions = field(default_factory=KlOptions)
    adv: AdvantageOptions = field(default_factory=AdvantageOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    trainer: TrainerOptions = field(default_factory=TrainerOptions)

    def __post_init__(self) -> None:
        if self.actor.freeze_steps and not self.has_critic:
            raise ConfigError(
                f"actor.freeze_steps={self.actor.freeze_steps}: in these steps the critic alone learns, and "
                f"adv.estimator={self.adv.estimator} has none"
            )
        if self.rollout.dynamic_filtering and (reason := self._why_equal_rewards_teach()):
            raise ConfigError(
                f"rollout.dynamic_filtering=true drops groups of equal rewards, from which this run learns: {reason}; "
                "leave rollout.dynamic_filtering out"
            )

        num_rows = self.train_data.prompts_per_rollout * self.responses_per_prompt
        if self.actor.update_per_rollout > num_rows:
            raise ConfigError(
                f"actor.update_per_rollout={self.actor.update_per_rollout}: a rollout of {num_rows} sequences "
                "(train_data.prompts_per_rollout x train_data.responses_per_prompt) is too small for so many steps"
            )
        if self.is_greedy and not self._why_equal_rewards_teach():
            raise ConfigError(
                "temperature 0 in training (rollout.train_sampling_params, or the workflow's gconfig): all "
                f"{self.responses_per_prompt} responses to a prompt are the same, and adv.estimator="
                f"{self.adv.estimator} learns from their differences alone; sample at a temperature above 0"
            )

    def sampled_by(self, train: SamplingOf | None, test: SamplingOf | None) -> PpoConfig:
        """Return the options of a run whose workflows sample so; None leaves that to the options.

        Raises: ConfigError for an option that says otherwise.
        """
        rollout = self.rollout
        if train is not None:
            rollout = _sampled_by(rollout, "train_sampling_params", train)
        if test is not None:
            rollout = _sampled_by(rollout, "test_sampling_params", test)
        return dataclasses.replace(self, rollout=rollout)

    @property
    def has_critic(self) -> bool:
        """Whether advantages need values."""
        return self.adv.estimator == "gae"

    @property
    def has_reference(self) -> bool:
        """Whether leaving the reference policy costs something."""
        return self.kl.type is not None

    @property
    def is_base_reference(self) -> bool:
        """Whether the reference is the actor without its adapters: of the same model, and nothing else is asked for."""
        own = self.ref_actor
        plain = ReferenceOptions(
            model_name=own.model_name, max_inference_length_per_device=own.max_inference_length_per_device
        )
        is_same = own == plain and own.model_name in (None, self.actor.model_name)
        return self.has_reference and self.actor.lora is not None and is_same

    @property
    def responses_per_prompt(self) -> int:
        """Responses in a group."""
        chosen = self.train_data.responses_per_prompt
        return (1 if self.has_critic else 8) if chosen is None else chosen

    @property
    def is_greedy(self) -> bool:
        """Whether training samples nothing, but takes the most likely tokens."""
        return self.rollout.train_sampling_params.temperature == 0

    @property
    def is_taught_by_equal_rewards(self) -> bool:
        """Whether something is learnt from a group of equal rewards."""
        return bool(self._why_equal_rewards_teach())

    @property
    def has_dynamic_filtering(self) -> bool:
        """Whether groups of equal rewards are replaced."""
        asked = self.rollout.dynamic_filtering
        return not self._why_equal_rewards_teach() if asked is None else asked

    def _why_equal_rewards_teach(self) -> str:
        """Why something is learnt from groups of equal rewards; "" if nothing is."""
        adv, size = self.adv, self.responses_per_prompt
        if adv.estimator == "gae":
            return "with adv.estimator=gae advantages depend on the critic"
        if size == 1:
            return "with train_data.responses_per_prompt=1 the baseline is the mean of the batch"
        if adv.global_norm:
            return "with adv.global_norm=true the baseline is the mean of the batch"
        if adv.gamma != 1:
            return f"with adv.gamma={adv.gamma} advantages depend on lengths"
        if self.kl.type in ("reward", "advantage"):
            return f"with kl.type={self.kl.type} advantages depend on the KL"
        if adv.estimator != "reinforce" and not is_of_group_alone(adv.estimator, adv.options, size):
            return f"with adv.estimator={adv.estimator} advantages depend on more than the rewards of the group"
        return ""

    def collector_options(self) -> CollectorOptions:
        """Return how the rollout engine collects."""
        rollout = self.rollout
        return CollectorOptions(
            consumer_batch_size=self.train_data.prompts_per_rollout,
            max_concurrent_rollouts=rollout.max_concurrent_rollouts,
            max_head_offpolicyness=rollout.max_head_offpolicyness,
            on_stale=rollout.on_stale,
            stale_timeout=rollout.stale_timeout,
            request_timeout=rollout.request_timeout,
            request_retries=rollout.request_retries,
            max_consecutive_failures=rollout.max_consecutive_failures,
            seed=self.trainer.seed if rollout.deterministic else None,
        )

    def without_effect(self) -> str:
        """The options that were set and that nothing reads, with the reason; "" if there are none."""
        critic, reference, kl = (
            [f"{name}.{field}" for field in _changed(group)]
            for name, group in (("critic", self.critic), ("ref_actor", self.ref_actor), ("kl", self.kl))
        )
        unread = []
        if critic and not self.has_critic:
            unread.append(f"{', '.join(critic)} (adv.estimator={self.adv.estimator} has no critic)")
        if (reference or kl) and not self.has_reference:
            unread.append(f"{', '.join(reference + kl)} (kl.type=null has no reference)")
        return "; ".join(unread)

    @property
    def temperature(self) -> float:
        """Of the log-probabilities that are trained; those of greedy sampling have 1."""
        chosen = self.actor.temperature
        return self.rollout.train_sampling_params.temperature or 1.0 if chosen is None else chosen

    def inference_length(self, model: ReferenceOptions | None = None) -> int | None:
        """Tokens of a microbatch in which the actor, or a model beside it, trains nothing."""
        own = None if model is None else model.max_inference_length_per_device
        return self.actor.max_inference_length_per_device if own is None else own

    @property
    def max_length(self) -> int:
        """The longest sequence that every model which is trained or asked can take."""
        models: list[ModelOptions] = [self.actor]
        models += [self.critic.as_model(self.actor)] if self.has_critic else []
        models += [self.ref_actor.as_model(self.actor)] if self.has_reference else []
        limits = [model.max_length_per_device * model.tp_size * model.sp_size for model in models]
        return min([*limits, *([self.rollout.max_model_len] if self.rollout.max_model_len else [])])


def _sampled_by(rollout: RolloutOptions, name: str, sampling: SamplingOf) -> RolloutOptions:
    """With what a workflow says in place of a group of sampling options."""
    group, gconfig = getattr(rollout, name), GenerationHyperparameters.from_mapping(sampling)
    said = {
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "max_new_tokens": gconfig.max_new_tokens,
        "top_p": gconfig.top_p,
        "top_k": max(gconfig.top_k, 0),
        "stop": list(gconfig.stop),
    }
    for option in _changed(group):
        if getattr(group, option) != said[option]:
            raise ConfigError(
                f"rollout.{name}.{option}={getattr(group, option)!r}, and the workflow samples with {option}="
                f"{said[option]!r}: its gconfig is what counts; leave the option out, or make the gconfig of it"
            )
    return dataclasses.replace(rollout, **{name: type(group)(**said)})


def _changed(group: Any) -> list[str]:
    """Fields of an options group that are not as they are by default."""
    default = type(group)()
    return [f.name for f in dataclasses.fields(group) if getattr(group, f.name) != getattr(default, f.name)]
