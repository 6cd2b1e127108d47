"""The engines of a reinforcement-learning trainer, and their turns on the devices that they share or divide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensordict import TensorDict

from rlite.data.packs import with_keys
from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.engine.weights import SyncReport
from rlite.observability import stats_tracker
from rlite.runtime.replicas.engine import Engine
from rlite.trainer.rl.objective import BothLogprobs, OwnLogprobs
from rlite.trainer.rl.statistics import report_off_policy


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
    def workers(self) -> list[RliteTrainEngine]:
        """Trained engines, and the reference if it is a model of its own."""
        return [*self.trained, *([] if self.reference is None else [self.reference])]

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


class LogprobPasses:
    """The forward passes that compute log-probabilities of rollouts under other policies.

    Args:
        engines: take turns on the device.
        temperature: temperature of the log-probabilities that are trained.
        has_reference: leaving the reference policy costs something.
        is_base_reference: the reference is the actor without its adapters.
        has_old: something compares with the policy before the updates of a batch.
        longest: tokens of one microbatch of the actor and of the reference; None is the engine's default.
        reports_off_policy: report `off_policy/*`.
        tis_coef: cap of the importance weights there.
    """

    def __init__(
        self,
        engines: Engines,
        temperature: float,
        *,
        has_reference: bool = False,
        is_base_reference: bool = False,
        has_old: bool = False,
        longest: tuple[int | None, int | None] = (None, None),
        reports_off_policy: bool = False,
        tis_coef: float | None = None,
    ) -> None:
        self._engines = engines
        self._full = OwnLogprobs(temperature=temperature, is_full=True)
        self._both = BothLogprobs(temperature=temperature)
        self._has_reference, self._is_base, self._has_old = has_reference, is_base_reference, has_old
        self._longest, self._longest_of_reference = longest
        self._reports_off_policy, self._tis_coef = reports_off_policy, tis_coef

    def with_reference(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `ref_logprobs` [N, L] in the whole vocabulary, if leaving the reference costs something.

        The reference is a model of its own, or the actor without its adapters.
        """
        if not self._has_reference:
            return batch
        with stats_tracker.record_timing("reference"):
            engine = self._engines.reference or self._engines.actor
            self._engines.move_to_device(engine)
            logprobs = engine.forward(batch, self._full, self._longest_of_reference, without_adapters=self._is_base)
        return with_keys(batch, ref_logprobs=logprobs)

    def with_old(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `old_logprobs` [N, L], from before the updates, if something compares with them.

        If the batch has kept ids, they are over these, and `full_old_logprobs` [N, L] in the whole vocabulary.
        """
        if not self._has_old:
            return batch
        with stats_tracker.record_timing("old_logprobs"):
            self._engines.move_to_device(self._engines.actor)
            found = self._engines.actor.forward(batch, self._both, self._longest)
        columns = {"old_logprobs": found[..., 0].contiguous()}
        if "kept_counts" in batch:
            columns["full_old_logprobs"] = found[..., 1].contiguous()
        batch = with_keys(batch, **columns)
        if self._reports_off_policy:
            report_off_policy(batch, self._tis_coef)
        return batch
