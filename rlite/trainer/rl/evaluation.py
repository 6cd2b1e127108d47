"""Evaluations of a reinforcement-learning run: which sets are due, and where they are evaluated."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlite.checkpoint.atomic import discard, publish
from rlite.errors import ConfigError
from rlite.evaluation.sets import Evaluation, EvaluationSet, evaluate
from rlite.rollout.collector.collector import RolloutCollector
from rlite.trainer.held_out.options import KEY
from rlite.trainer.held_out.prompt_options import HeldOutPromptOptions
from rlite.trainer.rl.engines import Engines
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.run.training_run import TrainingRun

EVALUATED = "evaluated"
"""folder of the model that is evaluated beside training, from which the best is chosen"""
Sets = Mapping[str, EvaluationSet]


@dataclass(frozen=True)
class Ended:
    """Evaluations of one policy version that have ended."""

    step: int
    """finished steps of training before the evaluations"""
    evaluations: Sequence[Evaluation]


class Evaluations(ABC):
    """The evaluations of a run.

    A set is due every `every` steps, at the end of the run, and if it asks for it before the first step. A run that is
    resumed owes the evaluations that were under way at its checkpoint.

    Args:
        options: the run's config.
        run: counts the steps.
        engines: serve the policy.
        sets: the sets by name.
    """

    def __init__(self, options: PpoConfig, run: TrainingRun, engines: Engines, sets: Sets) -> None:
        self.run, self.engines, self.sets = run, engines, sets
        self._default, self._options = options.trainer.test_freq, options.test_data
        self._asked: dict[str, int] = {}
        self._owed: set[str] = set()

    def due(self) -> list[EvaluationSet]:
        """Return the sets to evaluate after this step that are not asked for yet."""
        asked = {name for name, step in self._asked.items() if step == self.run.step}
        return [each for name, each in self.sets.items() if name not in asked and self._is_due(name)]

    def _is_due(self, name: str) -> bool:
        own = self._options.get(name, HeldOutPromptOptions())
        if name in self._owed:
            return True
        return self.run.is_due(own.every or self._default) if self.run.step else own.first

    def skip(self) -> None:
        """Evaluate nothing after this step."""
        self._mark(list(self.sets.values()))

    def _mark(self, sets: Sequence[EvaluationSet]) -> None:
        """Mark sets as evaluated, or begun, after this step."""
        self._asked |= dict.fromkeys((each.name for each in sets), self.run.step)
        self._owed.clear()

    def close(self) -> None:
        """Delete the evaluated model that was not the best."""
        discard(self.run.folder / EVALUATED)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned: the evaluations of the checkpoint's step that were under way are due."""
        self._owed = set(state.get("under_way", ())) & self.sets.keys()
        if self.run.step:
            self._asked = dict.fromkeys(self.sets.keys() - self._owed, self.run.step)

    @property
    @abstractmethod
    def collector(self) -> RolloutCollector:
        """The collector that runs the episodes."""

    @abstractmethod
    def has_work(self, is_saving: bool = False) -> bool:
        """Return whether `next` is to be called after this step (again).

        Args:
            is_saving: a checkpoint is about to be written.
        """

    @abstractmethod
    def next(self) -> Ended:
        """Make or begin evaluations, and return evaluations that have ended, which may be none."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the evaluations under way, which are of the step that has just ended."""

    @abstractmethod
    def save_evaluated(self, target: Path) -> None:
        """Write the model that the evaluations returned last are of into a folder."""


class InTurns(Evaluations):
    """Evaluations by the rollout engine, for which training waits. See `Evaluations`."""

    @property
    def collector(self) -> RolloutCollector:
        """The collector of the rollout engine."""
        return self.engines.rollout.collector

    def has_work(self, is_saving: bool = False) -> bool:
        """Return whether a set is due."""
        return bool(self.due())

    def next(self) -> Ended:
        """Evaluate the sets that are due, or all if none is.

        Returns:
            The evaluations.
        """
        sets = self.due() or list(self.sets.values())
        evaluations = [evaluate(self.collector, each) for each in sets]
        self._mark(sets)
        return Ended(self.run.step, evaluations)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: no evaluation is under way between two steps."""
        return {}

    def save_evaluated(self, target: Path) -> None:
        """Write the model as it is now."""
        with self.engines.trained_on_device():
            self.engines.actor.save(target)


class BackgroundEvaluations(Evaluations):
    """Evaluations by an engine with weights of its own, while training goes on.

    step M: sync the weights ──> a thread evaluates the sets that are due ──> step N > M: metrics, lag_steps = N - M

    The engine gets other weights only after the evaluation has ended: all tokens come from one policy version. Training
    waits for an evaluation when the next is due, before a checkpoint of a later step, and at the end. Therefore a
    checkpoint meets at most evaluations of its own step, and a run that resumes from it begins them again.

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

    @property
    def collector(self) -> RolloutCollector:
        """The collector of the engine for evaluations."""
        assert self.engines.evaluation is not None
        return self.engines.evaluation.collector

    def has_work(self, is_saving: bool = False) -> bool:
        """Return whether a set is due, or evaluations under way have ended or must end now."""
        if self.due():
            return True
        must_end = self.run.is_over or ((is_saving or self.run.is_save_due()) and self._step < self.run.step)
        return self._under_way is not None and (must_end or self._under_way.done())

    def next(self) -> Ended:
        """Wait for the evaluations under way, if there are some; else begin those that are due.

        Returns:
            The evaluations that were under way.
        """
        if self._under_way is None:
            self._begin(self.due() or list(self.sets.values()))
            return Ended(self.run.step, [])
        evaluations, self._under_way = self._under_way.result(), None
        return Ended(self._step, evaluations)

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the sets under way."""
        return {} if self._under_way is None else {"under_way": self._names}

    def save_evaluated(self, target: Path) -> None:
        """Move the model that was written when the evaluations began."""
        publish(self._candidate, target)

    @property
    def _candidate(self) -> Path:
        return self.run.folder / EVALUATED

    def _begin(self, sets: Sequence[EvaluationSet]) -> None:
        self._step, self._names = self.run.step, [each.name for each in sets]
        if self._keeps_model:
            with self.engines.trained_on_device():
                self.engines.actor.save(self._candidate)
        self.engines.sync_evaluation(self.run.step)
        collector = self.collector
        self._under_way = _in_thread(lambda: [evaluate(collector, each) for each in sets])
        self._mark(sets)


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
        return InTurns(options, run, engines, sets)
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
