"""The engines of a reinforcement-learning trainer, and their turns on the devices that they share or divide."""

from __future__ import annotations

from dataclasses import dataclass, field

from tensordict import TensorDict

from rlite.data.packs import with_keys
from rlite.data.routing import ROUTED
from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.engine.weights import SyncReport
from rlite.observability import stats_tracker
from rlite.runtime.replicas.engine import Engine
from rlite.trainer.rl.objective import BothLogprobs, OwnLogprobs
from rlite.trainer.rl.routing import RecordedLogprobs
from rlite.trainer.rl.statistics import report_off_policy


@dataclass(eq=False)
class Engines:
    """The actor, the rollout engine and, if the algorithm needs them, a critic and a reference.

    All engines are on all devices, unless rollouts run ahead: then the rollout engine has devices of its own, and the
    others share the rest. Engines that take turns are on the device one at a time: `move_to_device` moves one there and
    the previous one away. The rollout engine drops its weights, which the next `sync` writes again; the other engines
    move to host memory.
    """

    rollout: RliteInferenceEngine
    """serves the policy"""
    actor: RliteTrainEngine
    """the policy that is trained"""
    critic: RliteTrainEngine | None = None
    """predicts returns, if the algorithm needs it"""
    reference: RliteTrainEngine | None = None
    """the policy to stay near, if it is a model of its own"""
    teachers: dict[int, RliteTrainEngine] = field(default_factory=dict)
    """frozen teachers by their number"""
    evaluation: RliteInferenceEngine | None = None
    """serves evaluations with weights of its own; None: the rollout engine serves them"""
    is_apart: bool = False
    """the rollout engine has devices of its own"""
    takes_turns: dict[Engine, bool] = field(default_factory=dict)
    """engines, and true for each that leaves the device to others"""
    resident: Engine | None = None
    """the engine that is on the device, of those that take turns"""
    sends_adapter: bool = False
    """weight syncs send the actor's adapter alone, and the rollout engine keeps its base"""
    verify_every: int = 0
    """weight syncs from one that is verified to the next; 0 verifies none"""

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
        """Trained engines, and the frozen ones: teachers, and the reference if it is a model of its own."""
        return [*self.trained, *([] if self.reference is None else [self.reference]), *self.teachers.values()]

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
        if self.resident is self.rollout and not self.sends_adapter:
            self.rollout.meta()
        elif self.resident is not None:
            self.resident.cpu()
        self.resident = None

    def sync(self) -> SyncReport:
        """Write the actor's weights into the rollout engine, and leave that engine on the device.

        Returns bytes and seconds of the weight sync.
        """
        self.move_to_device(self.actor)
        is_verified = self.verify_every > 0 and (self.rollout.get_version() + 1) % self.verify_every == 0
        if not self.takes_turns[self.rollout]:
            report = self._send(is_verified)
            if not self.is_apart:
                self._leave()
            return report
        self.rollout.cuda("weights")
        report = self._send(is_verified)
        self.actor.cpu()
        self.rollout.cuda("kv_cache")
        self.resident = self.rollout
        return report

    def _send(self, is_verified: bool) -> SyncReport:
        if self.sends_adapter:
            return self.actor.p2p_adapter_sync(self.rollout, may_be_zero=True)
        return self.actor.p2p_weight_sync(self.rollout, verify_checksums=is_verified)


@dataclass(frozen=True, kw_only=True)
class LogprobPasses:
    """The forward passes that compute log-probabilities of rollouts under other policies."""

    engines: Engines
    """take turns on the device"""
    temperature: float
    """temperature of the log-probabilities that are trained"""
    has_reference: bool = False
    """leaving the reference policy costs something"""
    has_old: bool = False
    """something compares with the policy before the updates of a batch"""
    longest: tuple[int | None, int | None] = (None, None)
    """tokens of one microbatch of the actor and of the reference; None is the engine's default"""
    reports_off_policy: bool = False
    """report `off_policy/*`"""
    tis_coef: float | None = None
    """cap of the importance weights there"""
    records_routing: bool = False
    """the updates replay the experts of the pass for old log-probabilities"""

    def with_reference(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `ref_logprobs` [N, L] in the whole vocabulary, if leaving the reference costs something.

        The reference is a model of its own, or the actor without its adapters.
        """
        if not self.has_reference:
            return batch
        with stats_tracker.record_timing("reference"):
            engine = self.engines.reference or self.engines.actor
            self.engines.move_to_device(engine)
            hook = OwnLogprobs(temperature=self.temperature, is_full=True)
            own = batch.exclude(ROUTED)  # a policy of its own chooses itself
            logprobs = engine.forward(own, hook, self.longest[1], without_adapters=engine is self.engines.actor)
        return with_keys(batch, ref_logprobs=logprobs)

    def with_old(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `old_logprobs` [N, L], from before the updates, if something compares with them.

        If the batch has kept ids, they are over these, and `full_old_logprobs` [N, L] in the whole vocabulary. If the
        updates replay the experts of this pass, these are `routed_experts` [N, L, B].
        """
        if not self.has_old:
            return batch
        with stats_tracker.record_timing("old_logprobs"):
            self.engines.move_to_device(self.engines.actor)
            hook = (RecordedLogprobs if self.records_routing else BothLogprobs)(temperature=self.temperature)
            found = self.engines.actor.forward(batch.exclude("teacher_hidden"), hook, self.longest[0])
        columns = {}
        if self.records_routing:
            found, columns[ROUTED] = RecordedLogprobs.parts(found)
        columns["old_logprobs"] = found[..., 0].contiguous()
        if "kept_counts" in batch:
            columns["full_old_logprobs"] = found[..., 1].contiguous()
        batch = with_keys(batch, **columns)
        if self.reports_off_policy:
            report_off_policy(batch, self.tis_coef)
        return batch
