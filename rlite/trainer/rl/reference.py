"""The reference policy that a KL penalty measures against. Without one there is `NoReference`."""

from __future__ import annotations

from typing import Protocol

from tensordict import TensorDict

from rlite.engine.train import RliteTrainEngine
from rlite.observability import stats_tracker
from rlite.trainer.losses import OwnLogprobs
from rlite.trainer.rl.config import PpoConfig
from rlite.trainer.rl.engines import Engines


class AnyReference(Protocol):
    """What the trainer's loop asks of a reference."""

    def with_logprobs(self, batch: TensorDict) -> TensorDict: ...


class NoReference:
    """Nothing ties the policy to where it began."""

    def with_logprobs(self, batch: TensorDict) -> TensorDict:
        return batch


class Reference:
    """A policy that stays as it is: a model of its own, or the actor's without its adapters."""

    def __init__(
        self, options: PpoConfig, engines: Engines, engine: RliteTrainEngine, without_adapters: bool = False
    ) -> None:
        self._engines, self._engine = engines, engine
        self._without_adapters = without_adapters
        self._hook = OwnLogprobs(temperature=options.temperature)
        self._longest = options.inference_length(options.ref_actor)

    @stats_tracker.record_timing("reference")
    def with_logprobs(self, batch: TensorDict) -> TensorDict:
        """Add `ref_logprobs` [N, L], each token's under the reference."""
        self._engines.bring(self._engine)
        batch["ref_logprobs"] = self._engine.forward(batch, self._hook, self._longest, self._without_adapters)
        return batch


def find_reference(options: PpoConfig, engines: Engines) -> AnyReference:
    """The one that the engines have, the base of the actor's adapters, or none."""
    if options.is_base_reference:
        return Reference(options, engines, engines.actor, without_adapters=True)
    return NoReference() if engines.reference is None else Reference(options, engines, engines.reference)
