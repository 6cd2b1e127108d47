"""The reference policy that a KL penalty measures against. `NoReference` stands in for a missing one."""

from __future__ import annotations

from tensordict import TensorDict

from rlite.batch import with_keys
from rlite.engine.train import RliteTrainEngine
from rlite.observability import stats_tracker
from rlite.trainer.losses import OwnLogprobs
from rlite.trainer.rl.config import PpoConfig
from rlite.trainer.rl.engines import Engines


class NoReference:
    """No reference: the policy pays nothing for leaving its beginning."""

    def with_logprobs(self, batch: TensorDict) -> TensorDict:
        """Return the batch as it is."""
        return batch


class Reference:
    """A frozen policy: a model of its own, or the actor without its adapters.

    Args:
        options: the run's config.
        engines: take turns on the device.
        engine: holds the reference.
        without_adapters: the engine is the actor's, and its adapters are left out.
    """

    def __init__(
        self, options: PpoConfig, engines: Engines, engine: RliteTrainEngine, without_adapters: bool = False
    ) -> None:
        self._engines, self._engine = engines, engine
        self._without_adapters = without_adapters
        self._hook = OwnLogprobs(temperature=options.temperature)
        self._longest = options.inference_length(options.ref_actor)

    @stats_tracker.record_timing("reference")
    def with_logprobs(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `ref_logprobs` [N, L], the reference's log-probability of each token."""
        self._engines.move_to_device(self._engine)
        logprobs = self._engine.forward(batch, self._hook, self._longest, self._without_adapters)
        return with_keys(batch, ref_logprobs=logprobs)


def make_reference(options: PpoConfig, engines: Engines) -> NoReference | Reference:
    """Return the reference that the options ask for: a model, the base of the actor's adapters, or none."""
    if options.is_base_reference:
        return Reference(options, engines, engines.actor, without_adapters=True)
    return NoReference() if engines.reference is None else Reference(options, engines, engines.reference)
