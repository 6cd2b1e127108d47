"""The alarm of a run whose updates change no log-probability: the weights, or the adapters, do not arrive."""

from __future__ import annotations

from rlite.engine.inference import RliteInferenceEngine
from rlite.errors import WorkerDied
from rlite.trainer.callbacks import Metrics
from rlite.trainer.run.observer import Observer
from rlite.trainer.run.training_run import TrainingRun

PROBE = [3, 10, 1, 8, 15, 6, 13, 4]
"""tokens that every vocabulary has"""
SAME = "their bits are those of the verified sync before: dtype too narrow for the updates, or adapters not merged"
OTHER = "their bits have changed: the engine computes with a copy (packed, or captured in a graph), or with old caches"


class SyncProbe(Observer):
    """Evaluates a fixed sequence of tokens on every replica after each verified sync, and compares."""

    def __init__(self, engine: RliteInferenceEngine, every: int) -> None:
        self._engine, self._every, self._num_updates = engine, every, 0

    def on_start(self, run: TrainingRun, metrics: Metrics) -> None:
        """Evaluate the probe before the first sync."""
        self._known = self._evaluate()
        if not self._engine.capabilities.has_prompt_logprobs:
            why = f"the executor {self._engine.executor_name!r} has no prompt log-probabilities"
            run.console.warn("rollout.verify_sync: log-probabilities that do not change are not noticed", {"why": why})

    def on_train(self, run: TrainingRun, metrics: dict[str, float]) -> None:
        """Evaluate the probe after a verified sync."""
        self._num_updates += metrics.get("is_skipped", 1.0) < 1 and metrics["grad_norm"] * metrics["lr"] > 0
        if self._engine.get_version() % self._every:
            return
        (digest, before), self._known = self._known, self._evaluate()
        stuck = [index for index, (a, b) in enumerate(zip(before, self._known[1], strict=False)) if a == b]
        if stuck and self._num_updates:
            sent = "not known before" if digest is None else SAME if digest == self._known[0] else OTHER
            rows = {"replicas": str(stuck), "steps with updates": str(self._num_updates), "weights sent": sent}
            cause = "the policy was updated, and the engine computes the same log-probabilities, bit for bit"
            run.console.alarm(f"ALARM at step {run.step}: {cause}", rows)
        self._num_updates = 0

    def _evaluate(self) -> tuple[str | None, list[list[float]]]:
        """Return the digest of the weights, if it is known, and the log-probabilities of the probe on each replica."""
        can, digest = self._engine.capabilities.has_prompt_logprobs, self._engine.proof and self._engine.proof[0]
        try:
            return digest, self._engine.prompt_logprobs([PROBE] * self._engine.num_replicas) if can else []
        except WorkerDied:  # the lost replica is replaced
            return None, []
