"""Evaluations of a reinforcement-learning run: which sets are due, and where they are evaluated.

The sets that a reinforcement-learning run evaluates on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlite.errors import ConfigError
from rlite.evaluation.sets import Evaluation, EvaluationSet, evaluate_each
from rlite.rollout import RolloutWorkflow
from rlite.rollout.collector.collector import RolloutCollector
from rlite.runtime.storage.atomic import discard
from rlite.suggestions import UNNAMED, check_name
from rlite.trainer.held_out.options import KEY, HeldOutPromptOptions, key_of
from rlite.trainer.held_out.prompt_sets import EvaluationSchedule, check_samples
from rlite.trainer.options import SetSamplingOptions
from rlite.trainer.rl.engines import Engines
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.run.best import EVALUATED, evaluation_facts, write_evaluation_facts
from rlite.trainer.run.training_run import TrainingRun

LOOK_S = 1.0
"""seconds after which a wait for evaluations looks whether the run is interrupted"""
Sets = Mapping[str, EvaluationSet]


@dataclass(frozen=True)
class Ended:
    """Evaluations of one policy version that have ended."""

    step: int
    """finished steps of training before the evaluations"""
    evaluations: Sequence[Evaluation]


class Evaluations:
    """The evaluations of a run by the rollout engine, for which training waits.

    A set is due every `every` steps, at the end of the run, and if it asks for it before the first step. An interrupted
    run waits for no evaluation. A run that is resumed owes the evaluations that its checkpoint lacks.

    Args:
        options: the run's config.
        run: counts the steps.
        engines: serve the policy.
        sets: the sets by name.
    """

    def __init__(self, options: PpoConfig, run: TrainingRun, engines: Engines, sets: Sets) -> None:
        self.run, self.engines, self.sets = run, engines, sets
        own = {name: options.test_data.get(name, HeldOutPromptOptions()) for name in sets}
        every = {name: each.every or options.trainer.test_freq for name, each in own.items()}
        self._schedule = EvaluationSchedule(run, every, {name for name, each in own.items() if each.first})

    def due(self) -> list[EvaluationSet]:
        """Return the sets to evaluate after this step that are not asked for yet."""
        return [self.sets[name] for name in self._schedule.due()]

    def skip(self) -> None:
        """Evaluate nothing after this step."""
        self._schedule.mark(self.sets)

    def close(self) -> None:
        """Delete the evaluated model that was not the best."""
        discard(self.run.folder / EVALUATED)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned: the evaluations that had not ended are due.

        Those of an earlier step are due, too. They measure the weights of the checkpoint, because those of their own
        step are gone.
        """
        earlier = state.get("earlier", {"names": ()})
        self._schedule.resume([*state.get("under_way", ()), *earlier["names"]])

    @property
    def collector(self) -> RolloutCollector:
        """The collector that runs the episodes: of the engine for evaluations, if there is one."""
        return (self.engines.evaluation or self.engines.rollout).collector

    def has_work(self, is_saving: bool = False) -> bool:
        """Return whether a set is due and the run is not interrupted.

        Args:
            is_saving: a checkpoint is about to be written.
        """
        return bool(self.due()) and not self.run.is_interrupted

    def next(self) -> Ended:
        """Evaluate the sets that are due, or all if none is.

        Returns:
            The evaluations; if the run is interrupted meanwhile, those that have ended before.
        """
        sets = self.due() or list(self.sets.values())
        evaluations = evaluate_each(self.collector, sets, lambda: self.run.is_interrupted)
        self._schedule.mark(each.set.name for each in evaluations)
        return Ended(self.run.step, evaluations)

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the sets that are due, which an interruption has left."""
        return {"under_way": [each.name for each in self.due()]}

    def save_evaluated(self, target: Path) -> None:
        """Write the model that the evaluations returned last are of into a folder, unless it is there."""
        with self.engines.trained_on_device():
            self.engines.actor.save(target)


class BackgroundEvaluations(Evaluations):
    """Evaluations by an engine with weights of its own, while training goes on.

    step M: sync the weights ──> a thread evaluates the sets that are due ──> step N > M: metrics, lag_steps = N - M

    The engine gets other weights only after the evaluation has ended: all tokens come from one policy version. Training
    waits for an evaluation when the next is due, before a checkpoint of a later step, and at the end. Therefore a
    checkpoint meets at most evaluations of its own step, and a run that resumes from it begins them again.

    The checkpoint of an interrupted run may also meet evaluations of an earlier step. The run that resumes makes them
    again first: with the weights of their step if the evaluated model was kept, which `best_metric` needs.

    Args:
        options: the run's config.
        run: counts the steps.
        engines: serve the policy.
        sets: the sets by name.
    """

    def __init__(self, options: PpoConfig, run: TrainingRun, engines: Engines, sets: Sets) -> None:
        super().__init__(options, run, engines, sets)
        self._keeps_model = options.trainer.best_metric is not None
        self._under_way: Future[list[Evaluation]] | None = None
        self._step, self._names = 0, list[str]()
        self._left: tuple[int, list[str]] | None = None
        """evaluations of the kept model that an interruption has left: the step and the sets"""

    def has_work(self, is_saving: bool = False) -> bool:
        """Return whether a set is due, or evaluations under way have ended or must end now.

        If the run is interrupted, only evaluations that have ended count.
        """
        has_ended = self._under_way is not None and self._under_way.done()
        if self.run.is_interrupted:
            return has_ended
        must_end = self.run.is_over or ((is_saving or self.run.is_save_due()) and self._step < self.run.step)
        return has_ended or bool(self.due()) or self._left is not None or (must_end and self._under_way is not None)

    def next(self) -> Ended:
        """Wait for the evaluations under way, if there are some; else begin those that are due.

        Returns:
            The evaluations that were under way; none if the run is interrupted before their end.
        """
        if self._left is not None:
            (step, names), self._left = self._left, None
            self.engines.load_evaluation(self.run.folder / EVALUATED, step)
            self._start(step, [self.sets[name] for name in names])
        elif self._under_way is None:
            self._begin(self.due() or list(self.sets.values()))
        else:
            while not self._under_way.done() and not self.run.is_interrupted:
                wait([self._under_way], timeout=LOOK_S)
            if self._under_way.done():
                evaluations, self._under_way = self._under_way.result(), None
                return Ended(self._step, evaluations)
        return Ended(self.run.step, [])

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the sets under way, and of sets that are due, which an interruption has left."""
        due = [each.name for each in self.due()]
        if self._under_way is None:
            return {"under_way": due}
        if self._step == self.run.step:
            return {"under_way": [*self._names, *due]}
        return {"under_way": due, "earlier": {"step": self._step, "names": self._names}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned. An evaluation of an earlier step measures that step's weights if kept."""
        earlier, evaluated = state.get("earlier"), evaluation_facts(self.run.folder / EVALUATED)
        if earlier is not None and evaluated.get("step") == earlier["step"]:
            self._left = (earlier["step"], [name for name in earlier["names"] if name in self.sets])
            state = {"under_way": state["under_way"]}
        super().load_state_dict(state)

    def save_evaluated(self, target: Path) -> None:
        """Do nothing: the model was written when the evaluations began."""

    def _begin(self, sets: Sequence[EvaluationSet]) -> None:
        if self._keeps_model:
            evaluated = self.run.folder / EVALUATED
            with self.engines.trained_on_device():
                self.engines.actor.save(evaluated)
            write_evaluation_facts(evaluated, {"step": self.run.step})
        self.engines.sync_evaluation(self.run.step)
        self._start(self.run.step, sets)
        self._schedule.mark(self._names)

    def _start(self, step: int, sets: Sequence[EvaluationSet]) -> None:
        self._step, self._names = step, [each.name for each in sets]
        collector = self.collector
        self._under_way = _in_thread(lambda: evaluate_each(collector, sets, lambda: False))


def make_evaluations(options: PpoConfig, run: TrainingRun, engines: Engines, sets: Sets) -> Evaluations:
    """Return the evaluations of a run, as `trainer.evaluate` chooses.

    Args:
        options: the run's config.
        run: counts the steps.
        engines: serve the policy.
        sets: the sets by name.

    Raises:
        ConfigError: evaluations have devices of their own, and there is nothing to evaluate.
    """
    if options.trainer.evaluate == "in_turns":
        return Evaluations(options, run, engines, sets)
    if not sets:
        raise ConfigError(f"trainer.evaluate={options.trainer.evaluate}: nothing is evaluated without {KEY}.path")
    return BackgroundEvaluations(options, run, engines, sets)


def _in_thread(act: Callable[[], list[Evaluation]]) -> Future[list[Evaluation]]:
    """Return the future result of an action in a thread that does not outlive the program."""
    future: Future[list[Evaluation]] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="evaluation", daemon=True).start()
    return future


Rows = Sequence[Mapping[str, Any]]


def make_sets(
    options: PpoConfig,
    workflow: RolloutWorkflow,
    rows: Rows | Mapping[str, Rows],
    workflows: RolloutWorkflow | Mapping[str, RolloutWorkflow] | None,
) -> dict[str, EvaluationSet]:
    """Return the sets to evaluate on, by name.

    Args:
        options: the run's config; a set without options in `test_data` has the defaults.
        workflow: workflow of training. Its copy with the sampling for evaluation evaluates sets without a workflow.
        rows: rows of a single set, which may be none, or of several by name.
        workflows: workflow of all sets, or of some by name.

    Raises:
        ConfigError: a set samples several responses that are all the same, a workflow or options are of no set, or a
            name is not valid.
    """
    by_name = rows if isinstance(rows, Mapping) else {UNNAMED: rows} if len(rows) else {}
    own = workflows if isinstance(workflows, Mapping) else dict.fromkeys(by_name, workflows)
    if unknown := own.keys() - by_name.keys():
        raise ConfigError(
            f"test_workflow of {sorted(unknown)[0]!r}: there are rows of {', '.join(by_name) or 'no set'}"
        )
    asked = {name for name, chosen in options.test_data.items() if name != UNNAMED or chosen.path is not None}
    if unknown := asked - by_name.keys():
        key = key_of(sorted(unknown)[0])
        raise ConfigError(
            f"{key}: there are rows of {', '.join(map(key_of, by_name)) or 'no set'}; expected some of {key}"
        )
    found = {}
    for name, table in by_name.items():
        check_name(KEY, name)
        chosen, ours = options.test_data.get(name, HeldOutPromptOptions()), own.get(name)
        sampling = options.rollout.sampling_of(chosen.sampling) if ours is None else chosen.sampling
        found[name] = EvaluationSet(
            name=name,
            rows=table if chosen.limit is None else table[: chosen.limit],
            workflow=_sampled(workflow if ours is None else ours, sampling),
            samples=chosen.samples,
            k=chosen.largest_k,
            solved_at=chosen.solved_at,
        )
        check_samples(found[name])
    return found


def _sampled(workflow: RolloutWorkflow, sampling: SetSamplingOptions) -> RolloutWorkflow:
    """Return the workflow with the sampling options that are set; a workflow without a `gconfig` stays as it is."""
    if workflow.gconfig is None or (wanted := sampling.gconfig(workflow.gconfig)) == workflow.gconfig:
        return workflow
    return workflow.sampled_by(wanted)
