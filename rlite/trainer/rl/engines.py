"""The engines of a reinforcement-learning trainer, and their turns on the devices that they share or divide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import rlite
from rlite.engine.base import Engine
from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.engine.train_lifecycle import MemorySnapshot
from rlite.engine.weight_sync import SyncReport
from rlite.trainer.model.modules import critic_module, policy_module, trained_engine
from rlite.trainer.model.options import ModelOptions, frozen_build_options
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.rl.placement import check_engine, divide_devices, without_evaluation


class Engines:
    """The actor, the rollout engine and, if the algorithm needs them, a critic and a reference.

    All engines are on all devices, unless rollouts run ahead: then the rollout engine has devices of its own, and the
    others share the rest. Engines that take turns are on the device one at a time: `move_to_device` moves one there and
    the previous one away. The rollout engine drops its weights, which the next `sync` writes again; the other engines
    move to host memory.

    Args:
        options: the run's config.
        max_model_len: longest sequence that the rollout engine serves, in tokens; None is the engine's default.

    Raises:
        ConfigError: The rollouts truncate, and the rollout engine does not return the kept ids.
    """

    def __init__(self, options: PpoConfig, max_model_len: int | None = None) -> None:
        self._max_model_len = max_model_len
        actor, trainer = options.actor, options.trainer
        self._options = options
        self._takes_turns: dict[Engine, bool] = {}
        self._resident: Engine | None = None
        self.rollout = self._inference_engine()
        check_engine(options.rollout, self.rollout.extras)
        self.evaluation = None if trainer.evaluate == "in_turns" else self._inference_engine()
        """serves evaluations with weights of its own; None: the rollout engine serves them"""
        num_updates = max(trainer.total_steps - actor.freeze_steps, 1) * actor.update_per_rollout
        self.actor = trained_engine(policy_module, actor, num_updates)
        self.critic: RliteTrainEngine | None = None
        self.reference: RliteTrainEngine | None = None
        if options.has_critic:
            critic = options.critic.as_model(actor)
            self.critic = trained_engine(critic_module, critic, trainer.total_steps * actor.update_per_rollout)
        if options.has_reference and not options.is_base_reference:
            self.reference = RliteTrainEngine(policy_module(options.ref_actor.as_model(actor).model_name))

    def build(self) -> None:
        """Place the engines. Their sizes must divide the devices, else a ConfigError is raised."""
        session, options = rlite.current_session(), self._options
        rollout, actor = options.rollout, options.actor
        num_shared, num_evaluating = without_evaluation(len(session.devices), options.trainer, rollout.tp_size)
        num_training, num_generating = divide_devices(num_shared, rollout)
        models: list[tuple[RliteTrainEngine, ModelOptions, bool | None]] = [(self.actor, actor, actor.offload_model)]
        for engine, others in ((self.critic, options.critic), (self.reference, options.ref_actor)):
            if engine is not None:
                models.append((engine, others.as_model(actor), others.offload_model))
        build_options = [model.build_options(num_training, options.trainer.seed) for _, model, _ in models]
        self._build_inference(self.rollout, num_generating)
        if self.evaluation is not None and not num_evaluating:
            self._build_beside_rollouts(self.evaluation, num_generating)
        default = session.device == "cuda" if actor.offload_model is None else actor.offload_model
        self._is_apart = rollout.max_head_offpolicyness > 0
        self._takes_turns = {self.rollout: default and not self._is_apart}
        self._resident = self.rollout if self._takes_turns[self.rollout] else None
        owner = self.actor if self._is_apart else self.rollout
        for (engine, _, offload), own in zip(models, build_options, strict=True):
            own = frozen_build_options(own, session.device) if engine is self.reference else own
            engine.build(**own, colocate_with=None if engine is owner else owner)
            self._takes_turns[engine] = default if offload is None else offload
        if self.evaluation is not None and num_evaluating:
            self._build_inference(self.evaluation, num_evaluating)

    def _inference_engine(self) -> RliteInferenceEngine:
        rollout = self._options.rollout
        name = self._options.actor.model_name
        return RliteInferenceEngine(name, executor=rollout.executor, max_replacements=rollout.max_replacements)

    def _build_inference(
        self, engine: RliteInferenceEngine, num_devices: int, beside: RliteInferenceEngine | None = None
    ) -> None:
        options = self._options
        own = options.rollout.build_options(num_devices)
        if options.trainer.evaluate == "snapshot":
            own["gpu_memory_utilization"] /= 2  # two engines on the same devices
        engine.build(**own, max_model_len=self._max_model_len, seed=options.trainer.seed, colocate_with=beside)
        engine.rollout_options = options.collector_options()

    def _build_beside_rollouts(self, engine: RliteInferenceEngine, num_devices: int) -> None:
        """Build an engine on the devices of the rollouts. It sizes its KV cache by the memory that it finds free."""
        has_residency = self.rollout.capabilities.has_residency
        if has_residency:
            self.rollout.cpu()
        self._build_inference(engine, num_devices, self.rollout)
        if has_residency:
            self.rollout.cuda()

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
        if self._resident is self.rollout:
            self.rollout.meta()
        self._resident = None
        for engine in self._workers:
            if engine in snapshots or engine.has_died:
                engine.recover(snapshots.get(engine))
                if self._takes_turns[engine]:
                    engine.cpu()
        if self.rollout.get_version() != version:
            self.rollout.set_version(version)

    def begin_turns(self) -> None:
        """Move the engines that take turns to the host; before this call, all of them are on the device."""
        for engine, takes_turns in self._takes_turns.items():
            if takes_turns and engine is not self.rollout:
                engine.cpu()

    def move_to_device(self, engine: Engine) -> None:
        """Move an engine to the device, and the current engine away, if they take turns."""
        if not self._takes_turns[engine] or self._resident is engine:
            return
        self._leave()
        engine.cuda()
        self._resident = engine

    def _leave(self) -> None:
        if self._resident is self.rollout:
            self.rollout.meta()
        elif self._resident is not None:
            self._resident.cpu()
        self._resident = None

    @contextmanager
    def trained_on_device(self) -> Iterator[None]:
        """Keep all trained engines on the device, for a checkpoint, and the rollout engine on the host."""
        trained = [engine for engine in self.trained if self._takes_turns[engine]]
        if self._resident is self.rollout:
            self.rollout.cpu()
        for engine in trained:
            engine.cuda()
        yield
        for engine in trained:
            if engine is not self._resident:
                engine.cpu()
        if self._resident is self.rollout:
            self.rollout.cuda()

    def sync(self) -> SyncReport:
        """Write the actor's weights into the rollout engine, and leave that engine on the device.

        Returns:
            Bytes and seconds of the weight sync.
        """
        self.move_to_device(self.actor)
        if not self._takes_turns[self.rollout]:
            report = self.actor.p2p_weight_sync(self.rollout)
            if not self._is_apart:
                self._leave()
            return report
        self.rollout.cuda("weights")
        report = self.actor.p2p_weight_sync(self.rollout)
        self.actor.cpu()
        self.rollout.cuda("kv_cache")
        self._resident = self.rollout
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
