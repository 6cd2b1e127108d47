"""The engines of a reinforcement-learning trainer, and their turns on the devices that they share or divide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.engine.train_state import MemorySnapshot
from rlite.engine.weights import SyncReport
from rlite.runtime.replicas.engine import Engine


class Engines:
    """The actor, the rollout engine and, if the algorithm needs them, a critic and a reference.

    All engines are on all devices, unless rollouts run ahead: then the rollout engine has devices of its own, and the
    others share the rest. Engines that take turns are on the device one at a time: `move_to_device` moves one there and
    the previous one away. The rollout engine drops its weights, which the next `sync` writes again; the other engines
    move to host memory.

    Args:
        rollout: serves the policy.
        actor: the policy that is trained.
        critic: predicts returns, if the algorithm needs it.
        reference: the policy to stay near, if it is a model of its own.
        evaluation: serves evaluations with weights of its own; None: the rollout engine serves them.
    """

    def __init__(
        self,
        rollout: RliteInferenceEngine,
        actor: RliteTrainEngine,
        critic: RliteTrainEngine | None = None,
        reference: RliteTrainEngine | None = None,
        evaluation: RliteInferenceEngine | None = None,
    ) -> None:
        self.rollout, self.actor, self.critic, self.reference = rollout, actor, critic, reference
        self.evaluation = evaluation
        self.is_apart = False
        """the rollout engine has devices of its own"""
        self.takes_turns: dict[Engine, bool] = {}
        """engines, and true for each that leaves the device to others"""
        self.resident: Engine | None = None
        """the engine that is on the device, of those that take turns"""

    @property
    def other_trained(self) -> dict[str, RliteTrainEngine]:
        """Trained engines other than the actor, by name."""
        return {} if self.critic is None else {"critic": self.critic}

    @property
    def trained(self) -> list[RliteTrainEngine]:
        """All trained engines."""
        return [self.actor, *self.other_trained.values()]

    @property
    def has_lost_training(self) -> bool:
        """True if a worker of the actor, the critic or the reference has died."""
        return any(engine.has_died for engine in self._workers)

    @property
    def _workers(self) -> list[RliteTrainEngine]:
        return [*self.trained, *([] if self.reference is None else [self.reference])]

    def recover(self, snapshots: Mapping[RliteTrainEngine, MemorySnapshot], version: int) -> None:
        """Bring back the engines that have lost workers, and all trained engines to the state of their snapshots.

        Args:
            snapshots: one for each trained engine.
            version: policy version that the rollout engine goes back to.
        """
        if self.resident is self.rollout:
            self.rollout.meta()
        self.resident = None
        for engine in self._workers:
            if engine in snapshots or engine.has_died:
                engine.recover(snapshots.get(engine))
                if self.takes_turns[engine]:
                    engine.cpu()
        if self.rollout.get_version() != version:
            self.rollout.set_version(version)

    def begin_turns(self) -> None:
        """Move the engines that take turns to the host; before this call, all of them are on the device."""
        for engine, takes_turns in self.takes_turns.items():
            if takes_turns and engine is not self.rollout:
                engine.cpu()

    def move_to_device(self, engine: Engine) -> None:
        """Move an engine to the device, and the current engine away, if they take turns."""
        if not self.takes_turns[engine] or self.resident is engine:
            return
        self._leave()
        engine.cuda()
        self.resident = engine

    def _leave(self) -> None:
        if self.resident is self.rollout:
            self.rollout.meta()
        elif self.resident is not None:
            self.resident.cpu()
        self.resident = None

    @contextmanager
    def trained_on_device(self) -> Iterator[None]:
        """Keep all trained engines on the device, for a checkpoint, and the rollout engine on the host."""
        trained = [engine for engine in self.trained if self.takes_turns[engine]]
        if self.resident is self.rollout:
            self.rollout.cpu()
        for engine in trained:
            engine.cuda()
        yield
        for engine in trained:
            if engine is not self.resident:
                engine.cpu()
        if self.resident is self.rollout:
            self.rollout.cuda()

    def sync(self) -> SyncReport:
        """Write the actor's weights into the rollout engine, and leave that engine on the device.

        Returns:
            Bytes and seconds of the weight sync.
        """
        self.move_to_device(self.actor)
        if not self.takes_turns[self.rollout]:
            report = self.actor.p2p_weight_sync(self.rollout)
            if not self.is_apart:
                self._leave()
            return report
        self.rollout.cuda("weights")
        report = self.actor.p2p_weight_sync(self.rollout)
        self.actor.cpu()
        self.rollout.cuda("kv_cache")
        self.resident = self.rollout
        return report

    def sync_evaluation(self, version: int) -> None:
        """Write the actor's weights into the engine of evaluations, which is idle, as this policy version."""
        assert self.evaluation is not None
        with self.trained_on_device():
            self.actor.p2p_weight_sync(self.evaluation)
        self.evaluation.set_version(version)

    def load_evaluation(self, model: Path, version: int) -> None:
        """Load a saved model into the engine of evaluations, which is idle, as this policy version."""
        assert self.evaluation is not None
        self.evaluation.load(model)
        self.evaluation.set_version(version)
