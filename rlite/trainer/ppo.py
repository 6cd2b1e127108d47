"""Reinforcement learning with verifiable rewards: Dr. GRPO by default.

    python -m rlite.trainer.ppo actor.model_name=MODEL train_data.path=prompts.jsonl reward.path=my.py:correct
    torchrun --nproc_per_node=N -m rlite.trainer.ppo ...
    python -m rlite.trainer.ppo launcher=ray num_devices=N ...

A row of data holds `messages` or `prompt`. The reward receives its other keys. `--import FILE.py` lets rewards,
workflows, losses, advantages and callbacks that a file registers be chosen by name.
"""

from __future__ import annotations

from rlite.assembly.command import run_module
from rlite.trainer.rl.options import PpoConfig

if __name__ == "__main__":  # before the imports of this file, which load torch
    run_module("ppo", PpoConfig)

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite import config
from rlite.assembly.launch import serve_if_worker, session_of
from rlite.batch import with_keys
from rlite.data.chat.template import CLOCK
from rlite.data.packs import sequence_lengths
from rlite.data.prompts import PromptStream
from rlite.data.rows import Rows
from rlite.errors import StreamedDataError
from rlite.observability import stats_tracker
from rlite.rollout import RolloutWorkflow
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.runtime.cluster.session import has_session
from rlite.trainer.callbacks import Callback
from rlite.trainer.held_out.options import key_of, prefixed
from rlite.trainer.held_out.prompt_sets import ACCURACIES, reported_metrics
from rlite.trainer.invalid_evaluations import InvalidEvaluations
from rlite.trainer.losses import PolicyLoss
from rlite.trainer.rl.advantages import compute_advantages
from rlite.trainer.rl.alarms import Alarms
from rlite.trainer.rl.engines import Engines
from rlite.trainer.rl.evaluation import Ended, make_evaluations, make_sets, with_selected
from rlite.trainer.rl.logprob_passes import Critic, KlCoefficient, LogprobPasses
from rlite.trainer.rl.record import RunRecord
from rlite.trainer.rl.recovery import TrainRecovery, fit_again
from rlite.trainer.rl.report import batch_plan
from rlite.trainer.rl.rollouts import make_rollouts, mean_reward, read_prompts
from rlite.trainer.rl.workflows import check_lengths, held_out_workflows, workflow_maker
from rlite.trainer.run.best import check_evaluated
from rlite.trainer.run.program_objects import NOTHING, ProgramObjects
from rlite.trainer.run.training_run import TrainingRun, loss_stats, started_at, step_metrics

T = TypeVar("T")
SHOWN = (
    *("reward", "score", "loss", "response_length", "seconds", "tokens_per_second"),
    *("kl", "entropy", "grad_norm", "truncated", "logprob_drift"),
)
"""metrics of every step for the console, the most important first"""
OF_TOKENS = ("trained_logprobs", "entropies")
"""values of tokens that the loss returns for the record"""


class PpoTrainer:
    """Generates rollouts, computes advantages, updates the policy and syncs its weights; resumes where it was.

    Needs a session: call `rlite.init()` first.

    Args:
        options: the run's config.
        workflow: turns one row into rewarded trajectories. Its `gconfig` replaces `rollout.train_sampling_params`.
        train_rows: prompts to train on.
        test_rows: prompts to evaluate on, which may be none; or the prompts of several sets by name.
        test_workflow: runs evaluations; default: `workflow` with `rollout.test_sampling_params`, greedy. Or several
            workflows by the names of their sets.
        callbacks: callbacks besides those of `trainer.callbacks`.

    Raises:
        ConfigError: The options do not fit the workflow or each other.
        DataError: Some rows cannot be used.
    """

    name: ClassVar[str] = "ppo"
    """name of the command"""
    key: ClassVar[str] = "actor"
    """key of the model in the config"""
    data_key: ClassVar[str] = "train_data"
    """key of the data in the config"""
    config_class: ClassVar[type[PpoConfig]] = PpoConfig
    evaluated: ClassVar[Sequence[str]] = ACCURACIES
    """metrics of `evaluate`, from which trainer.best_metric chooses; a subclass with other metrics names them here"""

    def __init__(
        self,
        options: PpoConfig,
        workflow: RolloutWorkflow,
        train_rows: Sequence[Mapping[str, Any]],
        test_rows: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Mapping[str, Any]]] = (),
        test_workflow: RolloutWorkflow | Mapping[str, RolloutWorkflow] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        test_gconfig = test_workflow.gconfig if isinstance(test_workflow, RolloutWorkflow) else None
        options = options.sampled_by(workflow.gconfig, test_gconfig)
        self.options = options
        self.workflow = workflow
        sets = make_sets(options, workflow, test_rows, test_workflow)
        reported = reported_metrics(sets, self.evaluated, SHOWN)
        check_evaluated(options.trainer, reported.evaluated)
        tests = [(each.workflow, each.rows, key_of(name)) for name, each in sets.items()]
        self.context = check_lengths(options, [(workflow, train_rows, "train_data"), *tests])
        self.data = train_rows if isinstance(train_rows, Rows) else Rows(train_rows)
        self.prompts = PromptStream(
            train_rows, options.train_data.prompts_per_rollout, options.trainer.seed, self.data.mixture
        )
        self.loss = _loss(options)
        self.kl = KlCoefficient(options.kl)
        total_steps = options.trainer.total_steps
        self.run = TrainingRun(options, reported, total_steps, callbacks=callbacks)
        self.alarms = Alarms(options, self.run)
        self.invalid = InvalidEvaluations(options.test_data, self.run)
        self.engines = Engines(options, self.context.length)
        self.recovery = TrainRecovery(self.engines, options.trainer.max_recoveries)
        self.critic = None if self.engines.critic is None else Critic(options, self.engines, self.engines.critic)
        self.logprobs = LogprobPasses(options, self.engines)
        self.rollouts = make_rollouts(options, self.engines, workflow, self.prompts)
        self.evaluations = make_evaluations(options, self.run, self.engines, sets)
        self.ended = Ended(0, ())
        """result of the last call of `evaluations.next`"""
        self.record = RunRecord(options, self.run, self.engines)

    def fit(self) -> dict[str, float]:
        """Train to the last step.

        Returns:
            The metrics of the last step.

        Raises:
            StreamedDataError: a row that was read during training cannot be used. The steps before it are saved.
        """
        with self.run.held:
            with self.record:
                metrics = self._train()
            self.evaluations.close()
            self.run.close()
        return metrics

    def _train(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        self.start()
        try:
            while not self.run.is_over:
                with stats_tracker.record_timing("step"), self.run.generating():
                    generated = self.rollouts.next_batch()
                    batch = self.recovery.run(lambda: self.learn(generated), self.run.step)  # noqa: B023 - called now
                metrics = self.finish_step(batch)
        except StreamedDataError:
            self.run.save_before_bad_data(self._save_after_evaluations)
            raise
        return metrics

    def learn(self, batch: TensorDict) -> TensorDict:
        """Update the models from generated rollouts, and sync the policy's weights.

        Returns:
            The batch as it was trained on.
        """
        batch = self.logprobs.with_reference(batch)
        if self.critic is not None:
            batch = self.critic.with_values(batch)
        batch = self.logprobs.with_old(batch)
        batch = self.with_advantages(batch)
        if self.critic is not None:
            self.critic.update(batch)
        batch = self.update(batch)
        self.sync()
        self.recovery.keep()
        return batch

    # -- the phases ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Build the engines, resume if asked, report the plan, and evaluate what is due before the next step."""
        self.engines.build()
        facts = self.run.restore(self.engines.actor, **self.engines.other_trained)
        self.engines.begin_turns()
        if facts:
            self.prompts.load_state_dict(facts["prompts"])
            self.kl.load_state_dict(facts.get("kl", {}))
            self.sync()
            self.engines.rollout.set_version(self.run.step)
            self.rollouts.load_state_dict(facts["rollouts"])
            self.evaluations.load_state_dict(facts.get("evaluations", {}))
        self.recovery.keep()
        self.run.open()
        self.record.begin()
        self.run.show_plan(f"rlite {self.name}", self.plan)
        self.run.console.follow(self.engines.rollout.rollout_progress)
        self._evaluate_before_step()

    def plan(self) -> dict[str, str]:
        """Return how a step's work is divided, as text by topic."""
        return batch_plan(self.options, self.engines, self.workflow, self.context, self.data, self.evaluations.sets)

    def with_advantages(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `advantages` [N, L], and with `returns` [N, L] for a critic."""
        options = self.options
        is_single = options.responses_per_prompt == 1
        weights = {name: reward.weight for name, reward in options.reward.items()}
        return compute_advantages(batch, options.adv, options.kl, is_single, self.kl.coef, weights)

    @stats_tracker.record_timing("update")
    def update(self, batch: TensorDict) -> TensorDict:
        """Make the optimizer steps of one rollout batch.

        Returns:
            The batch, with `is_skipped` [N], and with `trained_logprobs` and `entropies` [N, L] if the run is recorded:
                NaN for the rows of an update without trained tokens.
        """
        if self.run.step < self.options.actor.freeze_steps:
            return batch
        actor, longest = self.engines.actor, self.options.inference_length()
        loss = replace(self.loss, kl_coef=self.kl.coef) if self.options.kl.type == "loss" else self.loss
        self.engines.move_to_device(actor)
        actor.train()
        columns: dict[str, Tensor] = {"is_skipped": torch.zeros(len(batch), dtype=torch.bool)}
        for rows in torch.arange(len(batch)).tensor_split(min(self.options.actor.update_per_rollout, len(batch))):
            stats = actor.train_batch(with_selected(batch[rows], actor, loss, longest), loss, loss.weight)
            actor.step_lr_scheduler()
            for name in stats.keys() & set(OF_TOKENS):  # an update without trained tokens has none
                columns.setdefault(name, torch.full(batch["attention_mask"].shape, math.nan))[rows] = stats.pop(name)
            columns["is_skipped"][rows] = bool(stats["is_skipped"])
            stats_tracker.scalar(**loss_stats(stats))
        return with_keys(batch, **columns)

    @stats_tracker.record_timing("sync")
    def sync(self) -> None:
        """Write the new weights into the rollout engine."""
        report = self.engines.sync()
        stats_tracker.scalar(sync_bytes=report.num_bytes, sync_seconds=report.seconds)

    def evaluate(self) -> dict[str, float]:
        """Make or begin the evaluations that are due, or of all sets if none is.

        Returns:
            The metrics of the evaluations that have ended, in which failed episodes are wrong; see
                `rlite.evaluation.metrics.summary`. Unless trainer.evaluate=in_turns, what begins now ends later.
        """
        with self.run.generating():
            self.ended = self.evaluations.next()
        is_beside = self.options.trainer.evaluate != "in_turns"
        lag = {"lag_steps": float(self.run.step - self.ended.step)} if is_beside else {}
        metrics: dict[str, float] = {}
        for each in self.ended.evaluations:
            metrics |= prefixed(each.set.name, each.metrics | lag)
            self.record.evaluation(each.set.name, self.ended.step, each.episodes)
        self.ended = replace(self.ended, evaluations=[each.without_episodes() for each in self.ended.evaluations])
        return metrics

    def _evaluate_before_step(self) -> None:
        """Make or begin the evaluations of the first step, or those that the run was interrupted before."""
        was_over = self.run.is_over
        metrics = self._evaluate_due()
        self.run.end_if_interrupted()  # the checkpoint owes these evaluations, if there is one
        if metrics:
            self.run.log_evaluation(metrics)
        # the last step owed them, or a threshold was reached
        if self.run.step and self.run.is_over and (metrics or not was_over):
            self._save_after_evaluations()

    def _evaluate_due(self, is_saving: bool = False) -> dict[str, float]:
        """Evaluate the sets that are due, and keep the best model.

        Args:
            is_saving: a checkpoint is about to be written, which meets no evaluation of an earlier step.

        Returns:
            The newest metrics; older ones are logged.
        """
        metrics: dict[str, float] = {}
        while self.evaluations.has_work(is_saving):
            before = self.ended
            with self.run.evaluation_time.measured():
                evaluation = self._on_result(self.evaluate)
            if self.ended is before:  # evaluate is a subclass's own
                self.evaluations.skip()
            if metrics.keys() & evaluation.keys():
                self.run.log_evaluation(metrics | self.run.evaluation_time.take())
                metrics = {}
            metrics |= evaluation
            evaluations = self.ended.evaluations
            first_losses = self.evaluations.collector.first_losses if evaluations else {}
            if valid := self.invalid.without(evaluation, evaluations, first_losses):
                self._judge(valid)
        return metrics | self.run.evaluation_time.take() if metrics else {}

    def _judge(self, evaluation: Mapping[str, float]) -> None:
        """Keep the model if it is the best so far, and pass its evaluation to callbacks and thresholds."""
        step = self.ended.step if self.ended.evaluations else self.run.step
        is_trained = step > 0
        if is_trained:
            self._on_result(lambda: self.run.save_best(evaluation, self.evaluations.save_evaluated, step))
        self.run.evaluated(evaluation, is_trained)

    def finish_step(self, batch: TensorDict) -> dict[str, float]:
        """Count the step, evaluate and save if due, and log.

        Returns:
            The step's metrics.
        """
        self.run.step += 1
        is_trained = self.run.step > self.options.actor.freeze_steps
        lengths = sequence_lengths(batch)
        metrics = self._on_result(lambda: step_metrics(self.engines.actor, lengths, is_trained))
        metrics["reward_trained"] = mean_reward(batch)
        metrics |= self.kl.adapt(metrics.get("kl"), len(batch))
        self.record.step(batch)
        metrics |= self._evaluate_due()
        self.run.log(metrics)
        collector = self.engines.rollout.collector
        self.alarms.look(metrics, collector.first_losses, collector.take_selection())
        if self.run.is_save_due():
            self._save_after_evaluations()
        return metrics

    def _on_result(self, act: Callable[[], T]) -> T:
        """Return the result of an action on what the step has trained, repeated if train workers are lost meanwhile."""
        return self.recovery.run(act, self.run.step - 1, restore=self.engines.sync)

    def _save_after_evaluations(self) -> None:
        """Save the run. Callbacks may have ended it, or it was interrupted, after the step's evaluations were begun."""
        if metrics := self._evaluate_due(is_saving=True):
            self.run.log_evaluation(metrics)
        self._on_result(self._save)

    def _save(self) -> None:
        self.record.before_checkpoint()
        with self.engines.trained_on_device():
            kept = {"rollouts": self.rollouts.state_dict()}
            facts = {"prompts": self.prompts.state_dict(), "kl": self.kl.state_dict()}
            self.run.save(kept, **facts, evaluations=self.evaluations.state_dict())
        self.record.after_checkpoint()

    # -- the command ---------------------------------------------------------------------------------------------

    @classmethod
    def main(cls, argv: Sequence[str]) -> None:
        """Run the trainer from the command line."""
        cls.train(config.load(cls.config_class, argv, aliases=cls.config_class.aliases))

    @classmethod
    def train(cls, options: PpoConfig, given: ProgramObjects = NOTHING) -> dict[str, float]:
        """Train in the program's session, or in one of its own.

        Args:
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
            train_rows, test_rows = read_prompts(options, given)
            workflow = workflow_maker(options, rewards, {"train_data": train_rows})
            testing = held_out_workflows(options, workflow, rewards, test_rows, given)

            def fit(options: PpoConfig) -> dict[str, float]:
                with session_of(options):
                    training = workflow(options.rollout.train_sampling_params)
                    return cls(options, training, train_rows, test_rows, testing, given.callbacks).fit()

            return fit(options) if has_session() else fit_again(fit, options)


def _loss(options: PpoConfig) -> PolicyLoss:
    actor = options.actor
    return PolicyLoss(
        policy_loss=actor.policy_loss.name,
        options=actor.policy_loss.options,
        clip_low=actor.clip,
        clip_high=actor.clip if actor.clip_high is None else actor.clip_high,
        avg_level=actor.avg_level,
        temperature=options.temperature,
        max_new_tokens=options.rollout.train_sampling_params.max_new_tokens,
        tis_coef=actor.tis_coef,
        rejection=actor.rejection,
        off_policy_threshold=actor.off_policy_threshold,
        entropy_coef=actor.entropy_coef,
        kl_coef=options.kl.coef if options.kl.type == "loss" else 0.0,
        kl_estimator=options.kl.loss_estimator,
        returns_tokens=options.trainer.record != "none",
    )


main = PpoTrainer.main
