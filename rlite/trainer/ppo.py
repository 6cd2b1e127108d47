"""Reinforcement learning with verifiable rewards.

By default the baseline is Dr. GRPO's, and the loss is a mean over the batch's tokens.

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
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.assembly import rl as assembly
from rlite.data.packs import with_keys
from rlite.observability import stats_tracker
from rlite.rollout.workflow import RolloutWorkflow
from rlite.trainer.callbacks import Callback
from rlite.trainer.held_out import ACCURACIES, prefixed
from rlite.trainer.rl.recovery import trained_on_device
from rlite.trainer.rl.rollouts import trajectory_rewards
from rlite.trainer.rl.statistics import with_selected
from rlite.trainer.run.observer import Observer
from rlite.trainer.run.training_run import Judged, TrainerLoop, loss_stats, step_metrics

T = TypeVar("T")


class PpoTrainer(TrainerLoop):
    """Generates rollouts, computes advantages, updates the policy and syncs its weights; resumes where it was.

    Needs a session: call `rlite.init()` first. The run loop around a step is `TrainerLoop.fit`.

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
        parts = assembly.Parts(options, workflow, train_rows, test_rows, test_workflow, callbacks, self.evaluated)
        self.parts, self.options, self.workflow = parts, parts.options, workflow
        self.run, self.engines, self.recovery = parts.run, parts.engines, parts.recovery
        self.data, self.prompts, self.rollouts = parts.data, parts.prompts, parts.rollouts
        self.logprobs, self.critic, self.loss = parts.logprobs, parts.critic, parts.loss
        self.coefficients = parts.coefficients
        self.evaluations, self.invalid = parts.evaluations, parts.invalid
        self.ended: Any = None
        """result of the run's own evaluations in the last call of `evaluate`; None: a subclass has made its own"""

    # -- a step --------------------------------------------------------------------------------------------------

    def _next_batch(self) -> TensorDict:
        """Return rollouts to learn from."""
        self.begin_step()
        return self.rollouts.next_batch()

    def begin_step(self) -> None:
        """Let the coefficients of the next step take effect, if they may differ from their options."""
        if self.coefficients.may_differ:
            assembly.begin_step(self, self.coefficients.at(self.run.step + 1))

    def learn(self, batch: TensorDict) -> TensorDict:
        """Update the models from generated rollouts, and sync the policy's weights.

        Returns:
            The batch as it was trained on.
        """
        batch = self.prepare(batch)
        if self.critic is not None:
            self.critic.update(batch)
        batch = self.update(batch)
        self.sync()
        self._keep_state()
        return batch

    def prepare(self, batch: TensorDict) -> TensorDict:
        """Return a batch with all keys that the losses read."""
        batch = self.logprobs.with_reference(batch)
        if self.critic is not None:
            batch = self.critic.with_values(batch)
        return self.with_advantages(self.logprobs.with_old(batch))

    def with_advantages(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `advantages` [N, L], and with `returns` [N, L] for a critic."""
        return self.parts.advantages(batch, kl_coef=self.coefficients.kl)

    @stats_tracker.record_timing("update")
    def update(self, batch: TensorDict) -> TensorDict:
        """Make the optimizer steps of one rollout batch.

        Returns:
            The batch, with `is_skipped` [N], and with `trained_logprobs` and `entropies` [N, L] if the run is recorded:
                NaN for the rows of an update without trained tokens.
        """
        if self.run.step < self.options.actor.freeze_steps:
            return batch
        actor, longest, loss = self.engines.actor, self.options.actor.max_inference_length_per_device, self.loss
        self.engines.move_to_device(actor)
        actor.train()
        columns: dict[str, Tensor] = {"is_skipped": torch.zeros(len(batch), dtype=torch.bool)}
        for rows in torch.arange(len(batch)).tensor_split(min(self.options.actor.update_per_rollout, len(batch))):
            part = with_selected(batch[rows], actor, loss, longest) if self.parts.is_selective else batch[rows]
            stats = actor.train_batch(part, loss, loss.weight)
            actor.step_lr_scheduler()
            for name in stats.keys() & {"trained_logprobs", "entropies"}:  # an update without trained tokens has none
                columns.setdefault(name, torch.full(batch["attention_mask"].shape, math.nan))[rows] = stats.pop(name)
            columns["is_skipped"][rows] = bool(stats["is_skipped"])
            stats_tracker.scalar(**loss_stats(stats))
        return with_keys(batch, **columns).exclude("teacher_hidden")  # it would take memory until the next batch

    @stats_tracker.record_timing("sync")
    def sync(self) -> None:
        """Write the new weights into the rollout engine."""
        report = self.engines.sync()
        stats_tracker.scalar(sync_bytes=report.num_bytes, sync_seconds=report.seconds)

    @stats_tracker.record_timing("snapshot")
    def _keep_state(self) -> None:
        """Keep the state of the trained engines, from which `learn` is repeated if workers are lost."""
        if self.recovery is not None:
            self.recovery.keep()

    def _repeated(self, act: Callable[[], T], is_counted: bool = True) -> T:
        """Return the result of an action on the engines, repeated if train workers are lost meanwhile."""
        if self.recovery is None:
            return act()
        if not is_counted:
            return self.recovery.run(act, self.run.step)
        return self.recovery.run(act, self.run.step - 1, restore=self.engines.sync)

    def _finish(self, learnt: TensorDict) -> dict[str, float]:
        """Return the metrics of a step after its end."""
        return self.finish_step(learnt)

    def finish_step(self, batch: TensorDict) -> dict[str, float]:
        """Count the step, evaluate and save if due, and log.

        Returns:
            The step's metrics.
        """
        return self._end_step(batch, lambda: self._metrics_of(batch))

    def _metrics_of(self, batch: TensorDict) -> dict[str, float]:
        metrics = step_metrics(batch) | {"reward_trained": trajectory_rewards(batch).mean().item()}
        own = self.coefficients
        return metrics | (own.end_step(self.run.step, metrics.get("kl"), len(batch)) if own.may_differ else {})

    # -- the run -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Build the engines, resume if asked, report the plan, and evaluate what is due before the next step."""
        self.parts.device_plan.build()
        facts = self.run.restore(self.engines.actor, **self.engines.other_trained)
        self.engines.begin_turns()
        if facts:
            self._continue(facts, "prompts", "kl")  # a checkpoint of other data is refused before weights move
            self.sync()
            self.engines.rollout.set_version(self.run.step)
            self._continue(facts, "rollouts", "evaluations")
        self._keep_state()
        self.run.observers = self.observers()
        self.run.open()
        self._evaluate_owed()

    def _continue(self, facts: Mapping[str, Any], *names: str) -> None:
        for name in names:
            self.parts.stateful[name].load_state_dict(facts.get(name, {}))

    def observers(self) -> Sequence[Observer]:
        """Return who observes the run: the record, sinks, the console and others."""
        return assembly.make_observers(self, self._repeated)

    def plan(self) -> dict[str, str]:
        """Return how a step's work is divided, as text by topic."""
        return assembly.make_plan(self.parts, self.workflow)

    def evaluate(self) -> dict[str, float]:
        """Make or begin the evaluations that are due, or of all sets if none is. A subclass may evaluate otherwise.

        Returns:
            The metrics of the evaluations that have ended, in which failed episodes are wrong; see
                `rlite.evaluation.metrics.summary`. Unless trainer.evaluate=in_turns, what begins now ends later.
        """
        with self.run.generating():
            self.ended = self.evaluations.next()
        is_beside = self.options.trainer.evaluate != "in_turns"
        lag = {"lag_steps": float(self.run.step - self.ended.step)} if is_beside else {}
        self.run.answered(self.ended.step, self.ended.evaluations)
        self.ended = replace(self.ended, evaluations=[each.without_episodes() for each in self.ended.evaluations])
        found = [prefixed(each.set.name, each.metrics | lag) for each in self.ended.evaluations]
        return {name: value for metrics in found for name, value in metrics.items()}

    def _is_evaluation_due(self, is_saving: bool) -> bool:
        """Return whether there is an evaluation to make, to begin or to await, perhaps before a save."""
        return bool(self.evaluations.sets) and self.evaluations.has_work(is_saving)

    def _evaluate_sets(self) -> Judged:
        """Return what `evaluate` has found in the sets that are due."""
        self.ended = None
        metrics = self._repeated(self.evaluate)
        if self.ended is None:  # `evaluate` is a subclass's own
            self.evaluations.skip()
            return Judged(metrics, metrics, self.run.step)
        evaluations = self.ended.evaluations
        first_losses = self.evaluations.collector.first_losses if evaluations else {}
        valid = self.invalid.without(metrics, evaluations, first_losses)
        return Judged(metrics, valid, self.ended.step if evaluations else self.run.step)

    def _save_evaluated(self, folder: Path) -> None:
        """Write the model that was evaluated last into a folder, unless it is there."""
        self.evaluations.save_evaluated(folder)

    def _save(self) -> None:
        with trained_on_device(self.engines):
            facts = {name: part.state_dict() for name, part in self.parts.stateful.items()}
            self.run.save({"rollouts": facts.pop("rollouts")}, **facts)

    # -- the command ---------------------------------------------------------------------------------------------

    main = classmethod(assembly.main)
    train = classmethod(assembly.train)


main = PpoTrainer.main
