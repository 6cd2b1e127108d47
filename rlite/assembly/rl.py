"""Reinforcement learning put together: the parts of a trainer, who observes it, and its command.

A trainer's part takes its own options. What follows from several groups of options is decided here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from tensordict import TensorDict

from rlite.algorithms import is_selective
from rlite.assembly.distillation import Distillation, loss_class, taught
from rlite.assembly.launch import main as main
from rlite.assembly.launch import serve_if_worker, session_of
from rlite.assembly.observers import LearningFacts, RunRecord, TemplateFile, run_observers
from rlite.assembly.plans import BatchPlan
from rlite.assembly.proof.chained import HashChain
from rlite.assembly.workflows import RunWorkflows
from rlite.data.chat.template import CLOCK
from rlite.data.prompts import PromptStream
from rlite.data.rows import Rows, mixed_rows, prompt_stream, read_source, streamed_source
from rlite.errors import ConfigError, SnapshotLost
from rlite.evaluation.sets import make_sets, reported_metrics
from rlite.evaluation.training import InvalidEvaluations, make_evaluations
from rlite.restarts import RestartBudget
from rlite.rollout import RolloutWorkflow
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.runtime.cluster.session import has_session, shutdown
from rlite.services.console.alarms import Alarms
from rlite.services.console.mfu import Repeated, UsageReport
from rlite.services.console.probe import SyncProbe
from rlite.trainer.callbacks import Callback
from rlite.trainer.held_out import HeldOutPromptOptions, held_out_sources, key_of
from rlite.trainer.options import TrainerOptions
from rlite.trainer.rl.coefficients import Coefficients
from rlite.trainer.rl.credit import credited_advantages
from rlite.trainer.rl.critic import Critic
from rlite.trainer.rl.device_plan import DevicePlan
from rlite.trainer.rl.engines import Engines, LogprobPasses
from rlite.trainer.rl.objective import PolicyLoss, compute_advantages
from rlite.trainer.rl.options import EPISODE, PpoConfig, PromptOptions
from rlite.trainer.rl.recovery import TrainRecovery
from rlite.trainer.rl.reward_engines import RewardEngines
from rlite.trainer.rl.rollouts import Rollouts
from rlite.trainer.rl.rollouts_ahead import RolloutsAhead
from rlite.trainer.rl.routing import NO_REPLAY, RoutingReplay
from rlite.trainer.rl.token_advantages import outcome_estimator
from rlite.trainer.run.best import check_evaluated
from rlite.trainer.run.observer import Observer
from rlite.trainer.run.program_objects import NOTHING, ProgramObjects
from rlite.trainer.run.resume import started_at
from rlite.trainer.run.training_run import TrainingRun
from rlite.trainer.sampling.prompts import SampledPrompts, sampled

T = TypeVar("T")
logger = logging.getLogger(__name__)
Table = Sequence[Mapping[str, Any]]
SHOWN = (
    *("reward", "score", "loss", "response_length", "seconds", "tokens_per_second"),
    *("kl", "divergence", "entropy", "grad_norm", "truncated", "logprob_drift"),
)
"""metrics of every step for the console, the most important first"""


class Parts:
    """Parts of a trainer.

    `workflow`: workflow of training; see `PpoTrainer`, also for the next four. `test_workflow`: workflow of
    evaluations, or several by the names of their sets.
    """

    def __init__(
        self,
        options: PpoConfig,
        workflow: RolloutWorkflow,
        train_rows: Table,
        test_rows: Table | Mapping[str, Table],
        test_workflow: RolloutWorkflow | Mapping[str, RolloutWorkflow] | None,
        callbacks: Sequence[Callback],
        evaluated: Sequence[str],
    ) -> None:
        test_gconfig = test_workflow.gconfig if isinstance(test_workflow, RolloutWorkflow) else None
        self.options = options = options.sampled_by(workflow.gconfig, test_gconfig)
        """options of a run whose workflows sample so"""
        trainer, maker = options.trainer, PartsMaker(options)
        sets = make_sets(options.test_data, options.rollout.sampling_of, workflow, test_rows, test_workflow)
        self.reported = reported_metrics(sets, evaluated, SHOWN)
        check_evaluated(trainer, self.reported.evaluated)
        tests = [(each.workflow, each.rows, key_of(name)) for name, each in sets.items()]
        asked = [(workflow, train_rows, "train_data"), *tests]
        self.context = RunWorkflows(options).check_lengths(asked)
        self.data = train_rows if isinstance(train_rows, Rows) else Rows(train_rows)
        num_prompts = options.train_data.prompts_per_rollout
        sampler = options.train_data.sampler.make()
        self.distillation = Distillation(options, workflow, self.data) if options.distill.teacher else None
        """the teachers; None without one"""
        self.run = TrainingRun(options, trainer.total_steps, callbacks=[*callbacks, *sampler])
        uniform = prompt_stream(train_rows, num_prompts, trainer.seed, self.data.mixture)
        watching = [*self.run.callbacks.by_name.values()]
        self.prompts = sampled(watching, self.data, uniform, num_prompts, trainer.seed)
        self.loss = maker.policy_loss()
        self.rewards = RewardEngines.of(
            asked, self.context.length, options.rollout.deterministic, trainer.max_recoveries
        )
        self.device_plan = DevicePlan(options, self.context.length, self.rewards)
        self.engines = engines = self.device_plan.engines
        made = workflow if self.distillation is None else self.distillation.keyed(workflow)
        self.rollouts = maker.rollouts(engines, made, self.prompts, self.device_plan.routing)
        self.logprobs = maker.logprobs(engines, self.device_plan.routing)
        if self.distillation is not None:
            self.logprobs = self.distillation.passes(self.logprobs, self.run)
        self.critic = maker.critic(engines)
        self.advantages = maker.advantages(workflow)
        """batch, weight of the KL -> batch with advantages"""
        self.coefficients = self.run.coefficients = Coefficients(options)
        self.evaluations = make_evaluations(options.test_data, trainer, self.run, engines, sets)
        self.invalid = InvalidEvaluations(options.test_data, self.run)
        self.stateful: dict[str, Any] = {
            "prompts": self.prompts,
            "kl": self.coefficients,  # its name in the checkpoints of earlier versions
            "rollouts": self.rollouts,
            "evaluations": self.evaluations,
        }
        """parts whose state a checkpoint keeps, by name, in the order in which they resume"""
        self.recovery = TrainRecovery(engines, trainer.max_recoveries) if trainer.max_recoveries else None
        """None: no state is kept, and a lost worker ends the run"""
        self.is_selective = is_selective(self.loss.configured)
        """true if the loss treats some tokens differently, which it chooses in the whole batch of an update"""


@dataclass(frozen=True)
class PartsMaker:
    """Makes the parts of a trainer that read several groups of options."""

    options: PpoConfig

    def policy_loss(self) -> PolicyLoss:
        """Return the loss of the policy."""
        options, actor = self.options, self.options.actor
        return loss_class(options.distill)(
            policy_loss=actor.policy_loss.name,
            options=actor.policy_loss.options,
            avg_level=actor.avg_level,
            max_new_tokens=options.rollout.train_sampling_params.max_new_tokens,
            tis_coef=actor.tis_coef,
            rejection=actor.rejection,
            off_policy_threshold=actor.off_policy_threshold,
            kl_estimator=options.kl.loss_estimator,
            returns_tokens=options.trainer.record != "none",
            **self.coefficients(),
        )

    def coefficients(self) -> dict[str, Any]:
        """Return the fields of the policy's loss that may change during a run."""
        options, actor = self.options, self.options.actor
        return {
            "clip_low": actor.clip,
            "clip_high": actor.clip if actor.clip_high is None else actor.clip_high,
            "temperature": options.temperature,
            "entropy_coef": actor.entropy_coef,
            "kl_coef": options.kl.coef if options.kl.type == "loss" else 0.0,
        }

    def advantages(self, workflow: RolloutWorkflow) -> Callable[..., TensorDict]:
        """Return the function of a batch and `kl_coef` that computes advantages."""
        options = self.options
        given: dict[str, Any] = {
            "adv": options.adv,
            "kl": options.kl,
            "is_single": options.responses_per_prompt == 1,
            "weights": {name: reward.weight for name, reward in options.reward.items()},
            "estimator": outcome_estimator(options.adv),
        }
        if options.adv.credit == EPISODE and workflow.num_seats == 1:
            return taught(partial(compute_advantages, **given), options.distill)
        return taught(partial(credited_advantages, num_seats=workflow.num_seats, **given), options.distill)

    def logprobs(self, engines: Engines, routing: RoutingReplay) -> LogprobPasses:
        """Return the forward passes beside the update."""
        options, actor = self.options, self.options.actor
        return LogprobPasses(
            engines=engines,
            temperature=options.temperature,
            has_reference=options.has_reference,
            has_old=options.has_old_logprobs,
            longest=(actor.max_inference_length_per_device, options.ref_actor.inference_length(actor)),
            reports_off_policy=actor.off_policy_metrics,
            tis_coef=actor.tis_coef,
            records_routing=routing.source == "old_policy",
        )

    def critic(self, engines: Engines) -> Critic | None:
        """Return the critic, if advantages need values."""
        if engines.critic is None:
            return None
        options, length = self.options, self.options.rollout.train_sampling_params.max_new_tokens
        return Critic(engines, engines.critic, options.critic, options.actor, length)

    def rollouts(
        self, engines: Engines, workflow: RolloutWorkflow, prompts: PromptStream, routing: RoutingReplay = NO_REPLAY
    ) -> Rollouts:
        """Return the source of batches: they are generated in turns with training, or ahead of it."""
        options, rollout = self.options, self.options.rollout
        sizes = options.train_data.prompts_per_rollout, options.responses_per_prompt
        recorded = routing if routing.source == "rollout" else None
        kind = RolloutsAhead if rollout.max_head_offpolicyness else Rollouts
        generated = None
        if isinstance(prompts, SampledPrompts):
            workflow, generated = prompts.numbered(workflow), prompts.generated()
        others: Any = options.has_dynamic_filtering, recorded, generated
        return kind(rollout, engines.rollout, workflow, prompts, *sizes, *others)


def begin_step(trainer: Any, values: Mapping[str, float]) -> None:
    """Let coefficients take effect in the next step of a trainer."""
    fields = PartsMaker(trainer.options.with_coefficients(values)).coefficients()
    trainer.loss, trainer.coefficients.kl = replace(trainer.loss, **fields), values.get("kl_coef")
    trainer.logprobs = replace(trainer.logprobs, temperature=fields["temperature"])
    if "temperature" in values:
        if (gconfig := trainer.workflow.gconfig) is None:
            raise ConfigError("schedule.temperature: a workflow without a gconfig decides its sampling itself")
        trainer.workflow.gconfig = gconfig.new(temperature=values["temperature"], greedy=False)


def make_observers(trainer: Any, repeated: Repeated) -> list[Observer]:
    """Return the observers of a trainer's run, after its engines are built."""
    parts: Parts = trainer.parts
    options, rollout = parts.options, parts.engines.rollout
    record = RunRecord(options.trainer, parts.run, rollout, options.has_dynamic_filtering)
    usage = UsageReport(parts.engines.actor, repeated, options.actor.freeze_steps)
    equal_rewards = options.equal_rewards
    own = run_observers(parts.run, parts.reported, trainer.name, trainer.plan, rollout.rollout_progress)
    learns_rewards = not options.distill.is_without_rewards
    own_limit = f"rollout.max_turns={options.rollout.max_turns}"
    turn_limit = own_limit if options.rollout.env_path else "max_turns of the workflow"
    is_ahead = options.rollout.max_head_offpolicyness > 0
    alarms = Alarms(rollout, is_ahead, equal_rewards.can_teach, learns_rewards, turn_limit)
    template = TemplateFile(options.train_data.chat_template_path)
    probe = [SyncProbe(rollout, every)] if (every := options.rollout.verify_sync) else []
    own += [alarms, *probe, LearningFacts(equal_rewards), template, HashChain(trainer, parts.run)]
    return [usage, record, *own]


def make_plan(parts: Parts, workflow: RolloutWorkflow) -> dict[str, str]:
    """Return how a step's work is divided, as text by topic."""
    plan = BatchPlan(parts.options, parts.engines, workflow, parts.context, parts.data, parts.evaluations.sets)
    teachers = {} if parts.distillation is None else parts.distillation.topic()
    return plan.topics() | parts.device_plan.routing.topic() | parts.rewards.topic() | teachers


def read_prompts(
    data: PromptOptions, test_data: Mapping[str, HeldOutPromptOptions], given: ProgramObjects = NOTHING
) -> tuple[Rows, dict[str, Rows]]:
    """Return the rows of train_data, and the rows of each set of test_data.

    `given`: rows of a program, in place of those of the paths.
    """
    sources = {name: given.source(source) for name, source in data.sources("train_data").items()}
    if data.streaming:
        rows = streamed_source(sources[""], "prompts", data.shuffle_buffer)
    else:
        parts = {name: read_source(source, "prompts") for name, source in sources.items()}
        rows = mixed_rows(parts, data.weights) if data.mixture else parts[""]
    tests = held_out_sources(test_data, data.columns, data.system_prompt, data.map)
    return rows, {name: read_source(given.source(source), "prompts") for name, source in tests.items()}


def train(cls: type[Any], options: PpoConfig, given: ProgramObjects = NOTHING) -> dict[str, float]:
    """Train in the program's session, or in one of its own.

    Args:
        cls: a class of trainers.
        options: the run's config.
        given: objects of a program, in place of what the options name.

    Returns:
        The metrics of the last step.

    Raises:
        ConfigError: train_data.path or a source of rewards is missing, or a reward cannot be used.
    """
    options.check_complete()
    serve_if_worker(options)
    with CLOCK.fixed(started_at(options)):
        rewards = ChosenRewards(options.reward, given.functions()) if options.reward else None
        train_rows, test_rows = read_prompts(options.train_data, options.test_data, given)
        workflows = RunWorkflows(options)
        workflow = workflows.maker(rewards, {"train_data": train_rows})
        testing = workflows.held_out(workflow, rewards, test_rows, given)

        def fit(run: TrainerOptions) -> dict[str, float]:
            with session_of(options):
                own = options.model_copy(update={"trainer": run})
                training = workflow(options.rollout.train_sampling_params)
                return dict(cls(own, training, train_rows, test_rows, testing, given.callbacks).fit())

        return fit(options.trainer) if has_session() else fit_again(fit, options.trainer)


def fit_again(fit: Callable[[TrainerOptions], T], options: TrainerOptions) -> T:
    """Return what `fit` returns, called again from the newest checkpoint if a node dies with a part of the state.

    `options`: options of the run. `overwrite` applies to the first call only.
    """
    budget = RestartBudget(options.max_recoveries)
    began: list[float] = []
    while True:
        try:
            return fit(options)
        except SnapshotLost as error:
            if not budget.allows(began, time.monotonic()):
                raise
            logger.warning("training goes back to the newest checkpoint: %s", error)
        began.append(time.monotonic())
        shutdown()
        options = options.model_copy(update={"overwrite": False})
