"""Evaluations of a run: the sets that are due, where they are evaluated, and which of them count.

`make_evaluations` makes those of a reinforcement-learning run. A supervised run asks its `AnsweringEngine`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rlite
from rlite.engine.train import RliteTrainEngine
from rlite.errors import ConfigError
from rlite.evaluation.episodes import Evaluation, evaluate_each, serving_engine
from rlite.evaluation.metrics import selection_of
from rlite.evaluation.sets import EvaluationSet
from rlite.help import UNNAMED
from rlite.rollout.collector.calls import RolloutCollector
from rlite.rollout.collector.lost_groups import cause_of
from rlite.rollout.collector.options import CollectorOptions
from rlite.trainer.held_out import KEY, GeneratedOptions, HeldOutPromptOptions, key_of, without_sets
from rlite.trainer.options import ServingOptions, TrainerOptions
from rlite.trainer.rl.engines import Engines
from rlite.trainer.rl.recovery import sync_evaluation, trained_on_device
from rlite.trainer.run.best import EVALUATED, evaluation_facts, write_evaluation_facts
from rlite.trainer.run.schedule import EvaluationSchedule
from rlite.trainer.run.training_run import TrainingRun

LOOK_S = 1.0
"""seconds after which a wait for evaluations looks whether the run is interrupted"""
Sets = Mapping[str, EvaluationSet]


@dataclass(frozen=True)
class EndedEvaluations:
    """Evaluations of one policy version that have ended."""

    step: int
    """finished steps of training before the evaluations"""
    evaluations: Sequence[Evaluation]


class Evaluations:
    """The evaluations of a run by the rollout engine, for which training waits.

    A set is due every `every` steps, at the end of the run, and if it asks for it before the first step. An interrupted
    run waits for no evaluation. A run that is resumed owes the evaluations that its checkpoint lacks.
    """

    def __init__(self, run: TrainingRun, engines: Engines, sets: Sets, schedule: EvaluationSchedule) -> None:
        self.run, self.engines, self.sets, self._schedule = run, engines, sets, schedule

    def due(self) -> list[EvaluationSet]:
        """Return the sets to evaluate after this step that are not asked for yet."""
        return [self.sets[name] for name in self._schedule.due()]

    def skip(self) -> None:
        """Evaluate nothing after this step."""
        self._schedule.mark(self.sets)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned: the evaluations that had not ended are due.

        Those of an earlier step are due, too. They measure the weights of the checkpoint, because those of their own
        step are gone.
        """
        self._schedule.resume([*state.get("under_way", ()), *state.get("earlier", {"names": ()})["names"]])

    @property
    def collector(self) -> RolloutCollector:
        """The collector that runs the episodes: of the engine for evaluations, if there is one."""
        return (self.engines.evaluation or self.engines.rollout).collector

    def has_work(self, is_saving: bool = False) -> bool:
        """Return whether a set is due and the run is not interrupted."""
        return bool(self.due()) and not self.run.is_interrupted

    def next(self) -> EndedEvaluations:
        """Evaluate the sets that are due, or all if none is.

        Returns the evaluations; if the run is interrupted meanwhile, those that have ended before.
        """
        sets = self.due() or list(self.sets.values())
        evaluations = evaluate_each(self.collector, sets, lambda: self.run.is_interrupted)
        self._schedule.mark(each.set.name for each in evaluations)
        return EndedEvaluations(self.run.step, evaluations)

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the sets that are due, which an interruption has left."""
        return {"under_way": [each.name for each in self.due()]}

    def save_evaluated(self, target: Path) -> None:
        """Write the model that the evaluations returned last are of into a folder, unless it is there."""
        with trained_on_device(self.engines):
            self.engines.actor.save(target)


class BackgroundEvaluations(Evaluations):
    """Evaluations by an engine with weights of its own, while training goes on.

    step M: sync the weights ──> a thread evaluates the sets that are due ──> step N > M: metrics, lag_steps = N - M

    The engine gets other weights only after the evaluation has ended: all tokens come from one policy version. Training
    waits for an evaluation when the next is due, before a checkpoint of a later step, and at the end. Therefore a
    checkpoint meets at most evaluations of its own step, and a run that resumes from it begins them again.

    The checkpoint of an interrupted run may also meet evaluations of an earlier step. The run that resumes makes them
    again first: with the weights of their step if the evaluated model was kept, which `best_metric` needs.
    """

    def __init__(
        self, run: TrainingRun, engines: Engines, sets: Sets, schedule: EvaluationSchedule, keeps_model: bool
    ) -> None:
        super().__init__(run, engines, sets, schedule)
        self._keeps_model = keeps_model
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

    def next(self) -> EndedEvaluations:
        """Wait for the evaluations under way, if there are some; else begin those that are due.

        Returns the evaluations that were under way; none if the run is interrupted before their end.
        """
        if self._left is not None:
            (step, names), self._left = self._left, None
            sync_evaluation(self.engines, step, self.run.folder / EVALUATED)
            self._start(step, [self.sets[name] for name in names])
        elif self._under_way is None:
            self._begin(self.due() or list(self.sets.values()))
        else:
            while not self._under_way.done() and not self.run.is_interrupted:
                wait([self._under_way], timeout=LOOK_S)
            if self._under_way.done():
                evaluations, self._under_way = self._under_way.result(), None
                return EndedEvaluations(self._step, evaluations)
        return EndedEvaluations(self.run.step, [])

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
            with trained_on_device(self.engines):
                self.engines.actor.save(evaluated)
            write_evaluation_facts(evaluated, {"step": self.run.step})
        sync_evaluation(self.engines, self.run.step)
        self._start(self.run.step, sets)
        self._schedule.mark(self._names)

    def _start(self, step: int, sets: Sequence[EvaluationSet]) -> None:
        self._step, self._names = step, [each.name for each in sets]
        collector = self.collector
        self._under_way = _in_thread(lambda: evaluate_each(collector, sets, lambda: False))


def make_evaluations(
    options: Mapping[str, HeldOutPromptOptions], trainer: TrainerOptions, run: TrainingRun, engines: Engines, sets: Sets
) -> Evaluations:
    """Return the evaluations of a run, as `trainer.evaluate` chooses.

    `options`: `test_data`; a set without options has the defaults.
    """
    own = {name: options.get(name, HeldOutPromptOptions()) for name in sets}
    every = {name: each.every or trainer.test_freq for name, each in own.items()}
    schedule = EvaluationSchedule(run, every, {name for name, each in own.items() if each.first})
    if trainer.evaluate == "in_turns":
        return Evaluations(run, engines, sets, schedule)
    if not sets:
        raise ConfigError(f"trainer.evaluate={trainer.evaluate}: nothing is evaluated without {KEY}.path")
    return BackgroundEvaluations(run, engines, sets, schedule, keeps_model=trainer.best_metric is not None)


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


NUM_REASONS = 3
"""reasons for failed episodes that the console lists"""


class InvalidEvaluations:
    """Finds invalid evaluations, and reports the first one of each set.

    `options`: options of the sets by name; a set without options has the defaults.
    """

    def __init__(self, options: Mapping[str, GeneratedOptions], run: TrainingRun) -> None:
        self._options, self._run = options, run
        self._told: set[tuple[str, str]] = set()
        """sets, and what has been reported of them"""

    def without(
        self, metrics: Mapping[str, float], evaluations: Sequence[Evaluation], first_losses: Mapping[str, str]
    ) -> Mapping[str, float]:
        """Return logged metrics without those of invalid evaluations."""
        invalid = [each.set.name for each in evaluations if not self.is_valid(each, first_losses)]
        return {} if UNNAMED in invalid else without_sets(invalid, metrics)

    def is_valid(self, evaluation: Evaluation, first_losses: Mapping[str, str]) -> bool:
        """Return whether few enough episodes of an evaluation failed, and report the first invalid one of each set."""
        name, num_errors, num_episodes = evaluation.set.name, evaluation.lost.total(), len(evaluation.samples)
        for cause, facts in selection_of(evaluation.samples).alarms():
            self._alarm_once(name, cause, "evaluation", f": {cause}", facts)
        limit = self._options.get(name, GeneratedOptions()).max_error_share
        if num_errors <= limit * num_episodes:
            return True
        causes = Counter(map(cause_of, evaluation.lost.elements()))
        how = (
            f" is invalid, {num_errors} of {num_episodes} episodes failed ({key_of(name)}.max_error_share={limit:g}); "
            "such evaluations choose no best checkpoint"
        )
        rows = [(f"{count} x", first_losses.get(cause, cause)) for cause, count in causes.most_common(NUM_REASONS)]
        self._alarm_once(name, "invalid", "the evaluation", how, rows)
        return False

    def _alarm_once(self, name: str, cause: str, what: str, how: str, rows: Any) -> None:
        """Report a cause, once for each set."""
        if (name, cause) not in self._told:
            self._told.add((name, cause))
            of_set = f" of {name}" if name else ""
            self._run.console.alarm(f"ALARM at step {self._run.step}: {what}{of_set}{how}", rows)


class AnsweringEngine:
    """Answers prompts with the weights of the trained engine, in turns with training and on the same devices.

    On GPUs the trained model leaves the devices meanwhile. Without sets nothing is built.
    """

    def __init__(self, options: ServingOptions, model: str, seed: int, trained: RliteTrainEngine, sets: Sets) -> None:
        self._options, self._model, self._seed = options, model, seed
        self._trained, self._sets = trained, sets
        self._takes_turns = False

    def build(self) -> None:
        """Place the engine that answers."""
        if not self._sets:
            return
        self._takes_turns = rlite.current_session().device == "cuda"
        if self._takes_turns:
            self._trained.cpu()
        longest = _longest(self._sets.values())
        self._serving = serving_engine(self._model, self._options, longest, self._seed, "generation.", self._trained)
        self._serving.rollout_options = CollectorOptions(seed=self._seed)
        if self._takes_turns:
            self._serving.meta()
            self._trained.cuda()

    def evaluate(
        self, sets: Sequence[EvaluationSet], version: int, is_interrupted: Callable[[], bool]
    ) -> list[Evaluation]:
        """Return evaluations of the weights as they are now. On GPUs the trained engine is away meanwhile.

        Returns the evaluations that have ended before.
        """
        if self._takes_turns:
            self._serving.cuda("weights")
        self._trained.p2p_weight_sync(self._serving)
        self._serving.set_version(version)
        if self._takes_turns:
            self._trained.cpu()
            self._serving.cuda("kv_cache")
        evaluations = evaluate_each(self._serving.collector, sets, is_interrupted)
        if self._takes_turns:
            self._serving.meta()
            self._trained.cuda()
        return evaluations

    @property
    def first_losses(self) -> Mapping[str, str]:
        """The first reason of each cause of failed episodes."""
        return self._serving.collector.first_losses if self._sets else {}


def _longest(sets: Iterable[EvaluationSet]) -> int | None:
    """Return the most tokens of a sequence of some sets; None if a workflow does not know it."""
    lengths = []
    for each in sets:
        openings = [each.workflow.opening(row) for row in each.rows] if each.workflow.needs_prompt else [None]
        if None in openings:
            return None
        lengths.append(each.workflow.longest_sequence(max(len(opening or ()) for opening in openings)))
    return None if None in lengths else max(length for length in lengths if length is not None)


def stopping(each: EvaluationSet, end_ids: Sequence[int]) -> EvaluationSet:
    """Return a set whose answers also end with tokens that the served model does not know as its ends."""
    gconfig = each.workflow.gconfig
    if gconfig is None or gconfig.ignore_eos or not end_ids:
        return each
    gconfig = replace(gconfig, stop_token_ids=(*gconfig.stop_token_ids, *end_ids))
    return replace(each, workflow=each.workflow.sampled_by(gconfig))
