"""Recovery of a reinforcement-learning run from lost train workers, without an end of the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from rlite.engine.train import RliteTrainEngine
from rlite.engine.train_state import MemorySnapshot
from rlite.errors import SnapshotLost, WorkerError
from rlite.observability import stats_tracker
from rlite.restarts import RestartBudget
from rlite.runtime.cluster.session import shutdown
from rlite.trainer.rl.engines import Engines
from rlite.trainer.rl.options import PpoConfig

T = TypeVar("T")
logger = logging.getLogger(__name__)


class TrainRecovery:
    """Repeats the part of a step that a lost train worker interrupts, from the state at the end of the last step.

    Args:
        engines: the run's engines.
        max_recoveries: most recoveries in an hour; 0: no state is kept, and a lost worker ends the run.
    """

    def __init__(self, engines: Engines, max_recoveries: int) -> None:
        self._engines = engines
        self._budget = RestartBudget(max_recoveries)
        self._began: list[float] = []
        self._snapshots: dict[RliteTrainEngine, MemorySnapshot] = {}

    @stats_tracker.record_timing("snapshot")
    def keep(self) -> None:
        """Keep the state of all trained engines as that of the end of a step."""
        if self._budget.max_restarts:
            with self._engines.trained_on_device():
                self._snapshots = {engine: engine.take_snapshot() for engine in self._engines.trained}

    def run(self, act: Callable[[], T], version: int, restore: Callable[[], object] = lambda: None) -> T:
        """Return the result of an action on the engines, repeated after each recovery.

        Args:
            act: what a step does after its rollouts.
            version: policy version of the rollouts at the beginning of the step.
            restore: called after each recovery, before `act`.

        Raises:
            WorkerError: the budget of recoveries is used up, or no train worker was lost.
        """
        is_lost = False
        while True:
            try:
                if is_lost:
                    began = time.monotonic()
                    self._engines.recover(self._snapshots, version)
                    logger.warning("training goes on after %.1f s", time.monotonic() - began)
                    restore()
                return act()
            except WorkerError as error:
                now = time.monotonic()
                is_lost = self._engines.has_lost_training and not isinstance(error, SnapshotLost)
                if not is_lost or not self._budget.allows(self._began, now):
                    raise
                self._began.append(now)
                logger.warning("training goes back to the end of the last step: %s", error)


def fit_again(fit: Callable[[PpoConfig], T], options: PpoConfig) -> T:
    """Return what `fit` returns, called again from the newest checkpoint if a node dies with a part of the state.

    Args:
        fit: trains in a session of its own.
        options: the run's config. `trainer.overwrite` applies to the first call only.

    Raises:
        SnapshotLost: the budget of recoveries is used up.
    """
    budget = RestartBudget(options.trainer.max_recoveries)
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
        options = options.model_copy(update={"trainer": options.trainer.model_copy(update={"overwrite": False})})
