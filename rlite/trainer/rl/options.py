"""Options of reinforcement learning from rollouts. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from annotated_types import Ge
from pydantic import BeforeValidator, Field

import rlite
from rlite.config import Count, FinitePositive, Natural, Options, Rate, Share, changed
from rlite.errors import ConfigError, did_you_mean
from rlite.help import single_or_named
from rlite.registry import algorithms
from rlite.rollout.collector.options import CollectorLimits, CollectorOptions
from rlite.rollout.environments.file import EnvironmentOptions
from rlite.rollout.rewards.options import Rewards
from rlite.trainer.held_out import HeldOutPromptOptions
from rlite.trainer.model.options import K1_IS_NO_LOSS, ModelOptions
from rlite.trainer.options import (
    EvaluationSamplingOptions,
    LaunchOptions,
    SamplingOf,
    SamplingOptions,
    ServingOptions,
    SetSamplingOptions,
    TableOptions,
    TrainerOptions,
)
from rlite.trainer.rl.distillation_options import DistillationOptions
from rlite.trainer.rl.model_options import ActorOptions as ActorOptions
from rlite.trainer.rl.model_options import CriticOptions as CriticOptions
from rlite.trainer.rl.model_options import PolicyLossOptions as PolicyLossOptions
from rlite.trainer.rl.model_options import ReferenceOptions as ReferenceOptions
from rlite.trainer.rl.model_options import ScheduleOptions as ScheduleOptions
from rlite.trainer.run.best import check_evaluated
from rlite.trainer.sampling.sampler import UNIFORM, SamplerOptions
from rlite.types import GenerationHyperparameters, KLEstimator, KLLossEstimator

WHITENED = ("reinforce_pp", "reinforce_pp_baseline")
"""estimators whose advantages are whitened over the tokens of the batch"""
EPISODE, OWN = "episode", "own"
"""credit of branches that is not in `rlite.algorithms.CREDITS`: all share the episode's; each has its own reward"""
OWN_ESTIMATORS = ("reinforce", "gae", *WHITENED)
"""estimators that are not in `rlite.algorithms.ADVANTAGES`"""


def _can_be_a_loss(estimator: Any) -> Any:
    if estimator == "k1":
        raise ValueError(K1_IS_NO_LOSS)
    return estimator


class KlOptions(Options):
    """The price of leaving the reference policy."""

    type: Literal["reward", "loss", "advantage"] | None = None
    """place where it is paid: each token's reward, a term of the loss, or each token's advantage; null is nowhere"""
    coef: Rate = 1e-3
    """weight of the KL term"""
    reward_estimator: KLEstimator = "k1"
    """estimator of the types reward and advantage"""
    loss_estimator: Annotated[KLLossEstimator, BeforeValidator(_can_be_a_loss)] = "k2"
    """estimator of the type loss; k1 is none, because its gradient is 0 in expectation"""
    adaptive_target: FinitePositive | None = None
    """mean KL of a token towards which coef is adapted after each step; null keeps coef as it is"""
    adaptive_horizon: FinitePositive = 10000.0
    """sequences in which coef is adapted: the smaller, the faster"""


class AdvantageOptions(Options):
    """The way from rewards to advantages."""

    estimator: str = "reinforce"
    """reinforce: reward less the mean of its group; gae: with a critic; reinforce_pp: returns whitened over the tokens
    of the batch; reinforce_pp_baseline: rewards less the mean of their group, whitened so; or a name of
    `rlite.algorithms.ADVANTAGES`: dr_grpo, grpo, rloo, normalized, gpg, opo, pass_at_k, gdpo (of several rewards)"""
    options: dict[str, Any] = {}
    """keyword parameters of an estimator of ADVANTAGES"""
    gamma: Share = 1.0
    """discount for each token that the model writes; an outcome is the discounted sum of its trajectory's rewards"""
    lamda: Share = 1.0
    """lambda of gae: 1 relies on rewards alone, 0 on values"""
    global_norm: bool = False
    """the mean is the mean of the whole batch (gae: advantages are centred)"""
    norm_var: bool = False
    """divide by the standard deviation, of the group (GRPO), or with global_norm or gae of the whole batch. With gae it
    centres nothing: that is global_norm"""

    credit: str = EPISODE
    """credit of the branches (rows) of one episode. episode: all share its advantage; tokens, branches: each has its
    share of the episode's tokens, or an equal share; own: each is a member of its group with the rewards of its own
    turns; or a name of `rlite.algorithms.CREDITS`"""

    def problems(self) -> Iterator[str]:
        """Yield a message for an unknown estimator or credit, and for options that it does not have."""
        if self.credit not in (EPISODE, OWN) and self.credit not in (rules := algorithms("credit")):
            yield f"adv.credit={self.credit}: unknown credit; {did_you_mean(self.credit, [EPISODE, OWN, *rules])}"
        if self.gamma != 1 and self.estimator in ("gdpo", "reinforce_pp_baseline"):
            yield f"adv.gamma={self.gamma}: adv.estimator={self.estimator} discounts nothing; leave it out"
        is_named = self.estimator not in OWN_ESTIMATORS
        if is_named and self.estimator not in (known := algorithms("advantage")):
            hint = did_you_mean(self.estimator, [*OWN_ESTIMATORS, *known])
            yield f"adv.estimator={self.estimator}: unknown estimator; {hint}"
            return
        if self.estimator == "remax":
            yield "adv.estimator=remax needs a greedy response to each prompt, which this trainer does not sample"
        if is_named:
            known.check(self.estimator, self.options)
        unread = [*([] if is_named else ["options"]), *self.unread({"estimator": self.estimator})]
        if odd := [f"adv.{name}={value}" for name, value in self if name in unread and value]:
            yield f"adv.estimator={self.estimator}: it has no {', '.join(odd).lower()}; leave it out or override it"

    @classmethod
    def unread(cls, given: Mapping[str, Any]) -> Collection[str]:
        """Return the options of other estimators than the given one."""
        return () if given.get("estimator", "reinforce") in ("reinforce", "gae") else ("global_norm", "norm_var")


class EqualRewards(NamedTuple):
    """Answer to the question whether groups of equal rewards may teach something."""

    can_teach: bool
    reason: str
    """why they may, or may not, in words"""


class RolloutOptions(EnvironmentOptions, ServingOptions, CollectorLimits):
    """The engine that generates, and environments or workflows in place of rewards."""

    max_model_len: Annotated[int, Ge(2)] | None = None
    """longest prompt and responses together, in tokens; default: as long as the longest prompt and max_new_tokens need;
    in several turns, or if prompts are not known before, as much as the models and devices can take"""
    deterministic: bool = False
    """the same tokens and log-probabilities, bit by bit, after a resume as without it; executor torch alone, slower"""
    num_devices: Count | None = None
    """devices that only generate, if rollouts run ahead; default: half of them"""
    max_replacements: Natural = 3
    """lost replicas that are replaced in an hour, under Ray; the others take over their requests in any case"""
    verify_sync: Natural = 0
    """weight syncs from one that is verified to the next: SHA-256 digests of what was sent and of what is served are
    compared, and log-probabilities must change with the weights; 0 verifies none"""
    adapter_sync: bool | None = None
    """weight syncs send the adapter of actor.lora alone, and the engine serves it beside its base; default: if the
    executor can (vllm with enable_lora). false merges the adapter into the weights"""
    escape_special_tokens: bool = False
    """special tokens in messages, but for the assistant's, are plain text"""
    dynamic_filtering: bool | None = None
    """replace groups whose rewards are all equal by further prompts; default: if such groups teach nothing, because an
    advantage depends on the rewards of its group alone. Otherwise it is refused"""
    max_refills: Natural = 4
    """further rounds of generation for that, or as many groups per batch if rollouts run ahead; then groups of equal
    rewards are trained on, with an alarm"""
    train_sampling_params: SamplingOptions = SamplingOptions()
    """sampling for training; a workflow that is given to the trainer brings its own"""
    test_sampling_params: EvaluationSamplingOptions = EvaluationSamplingOptions()
    """sampling for evaluation; a workflow for evaluation that is given to the trainer brings its own"""

    def problems(self) -> Iterator[str]:
        """Yield a message for each rule of rollouts that run ahead that does not hold."""
        yield from super().problems()
        if self.max_head_offpolicyness and self.deterministic:
            yield (
                "rollout.deterministic=true promises the same bits again, which rollouts that run ahead of training "
                f"(rollout.max_head_offpolicyness={self.max_head_offpolicyness}) cannot keep; choose one of them"
            )
        if self.num_devices is not None and not self.max_head_offpolicyness:
            yield (
                f"rollout.num_devices={self.num_devices}: without rollout.max_head_offpolicyness generation and "
                "training take turns on all devices; set both or neither"
            )

    def sampling_of(self, own: SetSamplingOptions) -> SamplingOptions:
        """Return the sampling of a set to evaluate on, completed by the sampling for evaluation and for training."""
        return own.completed_by(self.test_sampling_params.completed_by(self.train_sampling_params))


class PromptOptions(TableOptions):
    """Prompts to train on."""

    prompts_per_rollout: Count = 32
    """prompts in one rollout batch"""
    responses_per_prompt: Count | None = None
    """responses to each prompt, a group; with 1 the batch's mean reward is the baseline; default: 8, with gae 1"""
    sampler: SamplerOptions = SamplerOptions()
    """choice of the prompts that are asked next"""

    def problems(self) -> Iterator[str]:
        """Yield a message for a sampler that has no table to choose from."""
        yield from super().problems()
        if self.streaming and self.sampler.name != UNIFORM:
            yield f"sampler.name={self.sampler.name} chooses among all rows, which streaming=true does not hold"
        if self.weights and self.sampler.name != UNIFORM:
            yield f"sampler.name={self.sampler.name} chooses the rows itself; leave the weights of the mixture out"


class PpoConfig(LaunchOptions):
    """Options of `rlite ppo`."""

    aliases: ClassVar[Mapping[str, str]] = {
        "actor.rollout.env_path": "rollout.env_path",
        "actor.entropy.coef": "actor.entropy_coef",
    }
    help_example: ClassVar[str] = (
        "actor.model_name=Qwen/Qwen3-0.6B train_data.path=prompts.jsonl reward.path=my.py:correct"
    )
    help_first: ClassVar[tuple[str, ...]] = (
        *("train_data.path", "test_data.path", "reward", "rollout.env_path"),
        *("train_data.prompts_per_rollout", "train_data.responses_per_prompt"),
        *("rollout.train_sampling_params.max_new_tokens", "actor.lr", "actor.lora", "kl.type", "kl.coef"),
        *("trainer.total_steps", "trainer.save_dir", "trainer.console", "launcher", "num_devices"),
    )

    actor: ActorOptions
    critic: CriticOptions = CriticOptions()
    ref_actor: ReferenceOptions = ReferenceOptions()
    train_data: PromptOptions = PromptOptions()
    test_data: dict[str, HeldOutPromptOptions] = Field(default={}, json_schema_extra=single_or_named)
    """prompts to evaluate on: test_data.path=... of one set, or test_data.NAME.path=... of several, whose metrics are
    NAME/accuracy, ..."""
    kl: KlOptions = KlOptions()
    distill: DistillationOptions = DistillationOptions()
    adv: AdvantageOptions = AdvantageOptions()
    reward: Rewards = {}
    """rewards of single-turn answers: reward.path=file.py:function, or reward.NAME.path=... for several, whose weighted
    sum counts; keys: path, weight, timeout, processes, memory_limit_gib, max_concurrent, in_process, env_vars"""
    rollout: RolloutOptions = RolloutOptions()
    schedule: ScheduleOptions = ScheduleOptions()
    trainer: TrainerOptions = TrainerOptions()

    def headline(self) -> str:
        """Return in a few words what is trained, on which data, and where the result goes."""
        return f"{self.actor.model_name} on {self.train_data.paths}, into {self.trainer.save_dir}"

    def check_complete(self) -> None:
        """Check that the options name prompts and a source of rewards."""
        data, source = self.train_data, "reward.path=file.py:function, rollout.env_path or rollout.workflow"
        needed = {
            "train_data.path": data.path is not None or data.mixture,
            f"a source of rewards ({source})": self.sources_of_rewards or self.distill.is_without_rewards,
        }
        if missing := [key for key, value in needed.items() if not value]:
            raise ConfigError(f"missing: {', '.join(missing)}; run with --help to see every option")
        if not self.test_data:
            check_evaluated(self.trainer, ())

    def problems(self) -> Iterator[str]:
        """Yield a message for each rule between models, rewards, advantages and rollouts that does not hold."""
        if len(sources := self.sources_of_rewards) > 1:
            yield f"{' and '.join(sources)} are given; expected one source of rewards"
        yield from self.rollout.problems_with(self.reward, "rollout.")
        yield from self._problems_of_teachers()
        if self.trainer.evaluation_devices is not None and self.trainer.evaluate != "beside":
            why = "evaluations have devices of their own with trainer.evaluate=beside; set both or neither"
            yield f"trainer.evaluation_devices={self.trainer.evaluation_devices}: {why}"
        if self.actor.freeze_steps and not self.has_critic:
            why = f"in these steps the critic alone learns, and adv.estimator={self.adv.estimator} has none"
            yield f"actor.freeze_steps={self.actor.freeze_steps}: {why}"
        num_rows = self.num_sequences
        if self.actor.update_per_rollout > num_rows:
            yield (
                f"actor.update_per_rollout={self.actor.update_per_rollout}: a rollout of {num_rows} sequences "
                "(train_data.prompts_per_rollout x train_data.responses_per_prompt) is too small for so many steps"
            )
        is_paid_by_token = self.kl.type in ("reward", "advantage") or self.adv.gamma != 1 or self.adv.credit == OWN
        is_paid_by_token = is_paid_by_token or bool(self.distill.teacher)
        if num_rows == 1 and self.adv.estimator == "reinforce" and not is_paid_by_token:
            yield (
                "train_data.prompts_per_rollout=1, responses_per_prompt=1: the baseline of a batch of one response is "
                "its own reward, so every advantage is 0; use more of either, or adv.estimator=gae"
            )
        yield from self._problems_of_gdpo()
        yield from self._problems_of_shares()
        scheduled = changed(self.schedule)
        yield from (f"schedule.{name}: {why}" for name, why in self.fixed_coefficients().items() if name in scheduled)
        if self.adv.estimator in OWN_ESTIMATORS:
            yield from self.slow_problems()
        rollout = self.rollout
        serves_alike = rollout.deterministic and rollout.dtype == "float32" and rollout.tp_size == self.actor.tp_size
        if self.actor.deterministic and not (serves_alike and rollout.executor == "torch"):
            yield (
                "actor.deterministic=true computes the rollout engine's log-probabilities bit for bit, which needs "
                "rollout.deterministic=true rollout.dtype=float32 rollout.executor=torch "
                f"rollout.tp_size={self.actor.tp_size} (the actor's); set them, or leave actor.deterministic out"
            )

    def _problems_of_teachers(self) -> Iterator[str]:
        own = self.distill
        if own.teacher and self.temperature != 1 and any(each.url is not None for each in own.teacher.values()):
            told = "a server returns log-probabilities at temperature 1"
            yield f"distill.teacher: {told}, and the policy is trained at {self.temperature:g}; set actor.temperature=1"
        has_views = own.by is not None or any(each.context is not None for each in own.teacher.values())
        if own.teacher and has_views and self.train_data.streaming:
            yield "distill: by and context look rows up, which train_data.streaming=true does not hold"
        if own.is_without_rewards and self.has_critic:
            yield "distill.task_rewards=false: adv.estimator=gae learns values of rewards; leave it out"
        for name, each in {} if self.sources_of_rewards else self.test_data.items():
            if own.is_without_rewards and not each.reward and each.workflow is None:
                key = f"test_data.{name}" if name else "test_data"
                yield f"{key}: without a reward of the run an evaluation needs one of its own; give {key}.reward.path"

    def _problems_of_gdpo(self) -> Iterator[str]:
        if self.adv.estimator != "gdpo":
            return
        if len(self.reward) == 1:
            yield "adv.estimator=gdpo normalises several rewards, each alone; give reward.NAME.path of each"
        if self.reward and "weights" in self.adv.options:
            yield "adv.options.weights: the weights of rewards are reward.NAME.weight; leave it out"
        if self.kl.type == "reward":
            yield "kl.type=reward: adv.estimator=gdpo has no single reward that could pay; use loss or advantage"

    def _problems_of_shares(self) -> Iterator[str]:
        # judges with the same options of the engine share one
        beside = {
            own.judge.engine_key: (f"reward.{name}.judge", own.judge.gpu_memory_utilization)
            for name, own in self.reward.items()
            if own.judge is not None and own.judge.url is None and own.num_devices is None
        }
        shares = [("rollout", self.rollout.gpu_memory_utilization), *beside.values()]
        total = sum(share for _, share in shares)
        if beside and total > 1.001:
            told = ", ".join(f"{key}.gpu_memory_utilization={share:g}" for key, share in shares)
            remedy = "lower one, or give a judge devices of its own (reward.NAME.num_devices)"
            yield f"{told}: engines on the same devices would take {total:g} of their memory; {remedy}"

    def fixed_coefficients(self) -> dict[str, str]:
        """Return the coefficients that cannot change during this run, with the reason."""
        kl, loss, fixed = self.kl, self.actor.policy_loss, dict[str, str]()
        if loss.name != "ppo_clip" or {"clip_low", "clip_high"} & loss.options.keys():
            why = f"the loss {loss.name} with the options {[*loss.options]} does not read actor.clip"
            fixed |= {"clip": why, "clip_high": why}
        if kl.type is None or kl.adaptive_target is not None:
            fixed["kl_coef"] = "kl.type=null has no KL" if kl.type is None else "kl.adaptive_target adapts it"
        if self.rollout.max_head_offpolicyness > 0:
            fixed["temperature"] = "a batch of rollouts that run ahead would mix temperatures"
        if self.distill.teacher:
            fixed["temperature"] = "teachers judge at one temperature"
        return fixed

    def with_coefficients(self, values: Mapping[str, float]) -> PpoConfig:
        """Return the options with other coefficients.

        `values`: valid values by the names of `ScheduleOptions`; other names do not count.
        """
        own = {name: values[name] for name in ("entropy_coef", "clip", "clip_high") if name in values}
        actor, kl, rollout = self.actor.model_copy(update=own), self.kl, self.rollout
        if "kl_coef" in values:
            kl = kl.model_copy(update={"coef": values["kl_coef"]})
        if "temperature" in values:
            sampling = rollout.train_sampling_params.model_copy(update={"temperature": values["temperature"]})
            rollout = rollout.model_copy(update={"train_sampling_params": sampling})
        return self.model_copy(update={"actor": actor, "kl": kl, "rollout": rollout})

    def slow_problems(self) -> Iterator[str]:
        """Yield a message for each rule on groups of equal rewards that does not hold."""
        if self.rollout.dynamic_filtering and (equal := self.equal_rewards).can_teach:
            why = f"{equal.reason}; leave rollout.dynamic_filtering out"
            yield f"rollout.dynamic_filtering=true drops groups of equal rewards, from which this run learns: {why}"
        if self.rollout.train_sampling_params.temperature == 0 and not self.equal_rewards.can_teach:
            yield (
                "temperature 0 in training (rollout.train_sampling_params, or the workflow's gconfig): all "
                f"{self.responses_per_prompt} responses to a prompt are the same, and adv.estimator="
                f"{self.adv.estimator} learns from their differences alone; sample at a temperature above 0"
            )

    def sampled_by(self, train: SamplingOf | None, test: SamplingOf | None) -> PpoConfig:
        """Return the options of a run whose workflows sample so.

        `train`: sampling parameters of the workflow for training; None leaves them to the options. `test`: sampling
        parameters of the workflow for evaluation; None leaves them to the options. Returns the options, with the
        parameters of the workflows.
        """
        rollout = self.rollout
        for name, sampling in (("train_sampling_params", train), ("test_sampling_params", test)):
            if sampling is not None:
                rollout = _sampled_by(rollout, name, sampling)
        return self.replace(rollout=rollout)

    @property
    def sources_of_rewards(self) -> list[str]:
        """Options that name a source of rewards; a run needs one."""
        own = [f"rollout.{name}" for name in ("env_path", "workflow") if getattr(self.rollout, name)]
        return ["reward", *own] if self.reward else own

    @property
    def has_critic(self) -> bool:
        """True if advantages need values."""
        return self.adv.estimator == "gae"

    @property
    def has_old_logprobs(self) -> bool:
        """True if log-probabilities from before a rollout's updates are computed."""
        actor, is_paid = self.actor, self.kl.type in ("reward", "advantage") or self.has_teacher_advantages
        is_compared = actor.off_policy_metrics or actor.routing_replay == "old_policy"
        return actor.update_per_rollout > 1 or is_paid or is_compared

    @property
    def has_reference(self) -> bool:
        """True if leaving the reference policy costs something."""
        return self.kl.type is not None

    @property
    def has_teacher_advantages(self) -> bool:
        """True if a teacher's log-probabilities are a part of the advantages."""
        return bool(self.distill.teacher) and self.distill.use_as == "advantage"

    @property
    def is_base_reference(self) -> bool:
        """True if the reference is the actor without its adapters: no other model, layout or kernel is asked for."""
        own, may_differ = self.ref_actor, {"model_name", "max_inference_length_per_device"}
        is_same = own.model_name in (None, self.actor.model_name) and may_differ.issuperset(changed(own))
        return self.has_reference and self.actor.lora is not None and is_same

    @property
    def responses_per_prompt(self) -> int:
        """Responses in a group."""
        chosen = self.train_data.responses_per_prompt
        return (1 if self.has_critic else 8) if chosen is None else chosen

    @property
    def num_sequences(self) -> int:
        """Responses in a rollout batch."""
        return self.train_data.prompts_per_rollout * self.responses_per_prompt

    @property
    def has_dynamic_filtering(self) -> bool:
        """True if groups of equal rewards are replaced."""
        asked = self.rollout.dynamic_filtering
        return not self.equal_rewards.can_teach if asked is None else asked

    @property
    def equal_rewards(self) -> EqualRewards:
        """Effect of groups of equal rewards: they may teach if an advantage depends on more than their rewards."""
        adv, kl, group_size = self.adv, self.kl, self.responses_per_prompt
        reasons = {
            "adv.estimator=gae advantages depend on the critic": adv.estimator == "gae",
            "train_data.responses_per_prompt=1 the baseline is the mean of the batch": group_size == 1,
            "adv.global_norm=true the baseline is the mean of the batch": adv.global_norm,
            f"adv.gamma={adv.gamma} advantages depend on lengths": adv.gamma != 1,
            "adv.credit=own advantages depend on the rewards of branches": adv.credit == OWN,
            f"kl.type={kl.type} advantages depend on the KL": kl.type in ("reward", "advantage"),
            "distill.teacher a teacher teaches in any case": bool(self.distill.teacher),
        }
        if found := [text for text, holds in reasons.items() if holds]:
            return EqualRewards(True, f"with {found[0]}")
        is_wider = adv.estimator in ("gdpo", *WHITENED)
        is_alone = adv.estimator == "reinforce" or (
            not is_wider and rlite.algorithms.is_of_group_alone(adv.estimator, adv.options, group_size)
        )
        if is_alone:
            alone = f"with adv.estimator={adv.estimator} advantages compare rewards of a group alone"
            return EqualRewards(False, alone)
        wider = f"with adv.estimator={adv.estimator} advantages depend on more than the rewards of the group"
        return EqualRewards(True, wider)

    def collector_options(self) -> CollectorOptions:
        """Return the options of the rollout engine's collector."""
        limits = {name: value for name, value in self.rollout if name in CollectorLimits.model_fields}
        return CollectorOptions(
            **limits,
            consumer_batch_size=self.train_data.prompts_per_rollout,
            is_filter_bounded=True,  # by rollout.max_refills
            keep_ended=self.trainer.record != "none",
            seed=self.trainer.seed if self.rollout.deterministic else None,
        )

    def without_effect(self) -> str:
        """Return the options that were set although nothing reads them, with the reason; "" if there are none."""
        reasons = {} if self.has_critic else {"critic": f"adv.estimator={self.adv.estimator} has no critic"}
        if not self.has_reference:
            reasons |= dict.fromkeys(("ref_actor", "kl"), "kl.type=null has no reference")
        if not self.distill.teacher:
            reasons["distill"] = "there is no distill.teacher"
        elif self.distill.is_without_rewards:
            reasons["adv"] = "distill.task_rewards=false"
        found: dict[str, list[str]] = {}
        for group, reason in reasons.items():
            names = changed(getattr(self, group), type(self).model_fields[group].default)
            found.setdefault(reason, []).extend(f"{group}.{name}" for name in names if name != "type")
        return "; ".join(f"{', '.join(keys)} ({reason})" for reason, keys in found.items() if keys)

    @property
    def temperature(self) -> float:
        """Temperature of the log-probabilities that are trained; 1 if sampling is greedy."""
        chosen = self.actor.temperature
        return self.rollout.train_sampling_params.temperature or 1.0 if chosen is None else chosen

    @property
    def models(self) -> list[ModelOptions]:
        """Options of all models, whose sequences are the same."""
        others = [*([self.critic] if self.has_critic else []), *([self.ref_actor] if self.has_reference else [])]
        others += [own for own in self.distill.teacher.values() if own.has_engine]
        return [self.actor, *(other.as_model(self.actor) for other in others)]

    @property
    def max_length(self) -> int:
        """Length of the longest sequence that all models can take, in tokens."""
        limits = [model.max_length_per_device * model.tp_size * model.sp_size for model in self.models]
        return min([*limits, *([self.rollout.max_model_len] if self.rollout.max_model_len else [])])


def _sampled_by(rollout: RolloutOptions, name: str, sampling: SamplingOf) -> RolloutOptions:
    """Return the options with a workflow's sampling parameters in place of a group of sampling options."""
    group, gconfig = getattr(rollout, name), GenerationHyperparameters.from_mapping(sampling)
    said = {option: getattr(gconfig, option) for option in type(group).model_fields}
    said |= {"temperature": 0.0 if gconfig.greedy else gconfig.temperature, "top_k": max(gconfig.top_k, 0)}
    said |= {option: list(said[option]) for option in ("stop", "stop_token_ids")}
    for option in changed(group):
        if getattr(group, option) != said[option]:
            raise ConfigError(
                f"rollout.{name}.{option}={getattr(group, option)!r}, and the workflow samples with {option}="
                f"{said[option]!r}: the workflow's gconfig decides sampling; remove the option or change the gconfig"
            )
    return rollout.replace(**{name: type(group)(**said)})
