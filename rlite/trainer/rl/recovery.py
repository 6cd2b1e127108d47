"""The trained engines between steps: saved, evaluated, or recovered from lost workers without an end of the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rlite.engine.train import RliteTrainEngine
from rlite.engine.train_state import MemorySnapshot
from rlite.errors import SnapshotLost, WorkerError
from rlite.restarts import RestartBudget
from rlite.trainer.rl.engines import Engines

T = TypeVar("T")
logger = logging.getLogger(__name__)


@contextmanager
def trained_on_device(engines: Engines) -> Iterator[None]:
    """Keep all trained engines on the device, for a checkpoint, and the rollout engine on the host."""
    trained = [engine for engine in engines.trained if engines.takes_turns[engine]]
    if engines.resident is engines.rollout:
        engines.rollout.cpu()
    for engine in trained:
        engine.cuda()
    yield
    for engine in trained:
        if engine is not engines.resident:
            engine.cpu()
    if engines.resident is engines.rollout:
        engines.rollout.cuda()


def sync_evaluation(engines: Engines, version: int, model: Path | None = None) -> None:
    """Give the engine of evaluations, which is idle, the actor's weights."""
    assert engines.evaluation is not None
    if model is not None:
        engines.evaluation.load(model)
    else:
        with trained_on_device(engines):
            engines.actor.p2p_weight_sync(engines.evaluation)
    engines.evaluation.set_version(version)


class TrainRecovery:
    """Repeats the part of a step that a lost train worker interrupts, from the state at the end of the last step."""

    def __init__(self, engines: Engines, max_recoveries: int) -> None:
        self._engines = engines
        self._budget = RestartBudget(max_recoveries)
        self._began: list[float] = []
        self._snapshots: dict[RliteTrainEngine, MemorySnapshot] = {}

    def keep(self) -> None:
        """Keep the state of all trained engines as that of the end of a step."""
        with trained_on_device(self._engines):
            self._snapshots = {engine: engine.take_snapshot() for engine in self._engines.trained}

    def run(self, act: Callable[[], T], version: int, restore: Callable[[], object] = lambda: None) -> T:
        """Return the result of an action on the engines, repeated after each recovery."""
        is_lost = False
        while True:
            try:
                if is_lost:
                    began = time.monotonic()
                    bring_back(self._engines, self._snapshots, version)
                    logger.warning("training goes on after %.1f s", time.monotonic() - began)
                    restore()
                return act()
            except WorkerError as error:
                now = time.monotonic()
                is_lost = any(engine.has_died for engine in self._engines.workers) and not isinstance(
                    error, SnapshotLost
                )
                if not is_lost or not self._budget.allows(self._began, now):
                    raise
                self._began.append(now)
                logger.warning("training goes back to the end of the last step: %s", error)


def bring_back(engines: Engines, snapshots: Mapping[RliteTrainEngine, MemorySnapshot], version: int) -> None:
    """Bring back the engines that have lost workers, and all trained engines to the state of their snapshots."""
    if engines.resident is engines.rollout:
        (engines.rollout.cpu if engines.sends_adapter else engines.rollout.meta)()
    engines.resident = None
    for engine in engines.workers:
        if engine in snapshots or engine.has_died:
            engine.recover(snapshots.get(engine))
            if engines.takes_turns[engine]:
                engine.cpu()
    if engines.rollout.get_version() != version:
        engines.rollout.set_version(version)
