"""The reference of a policy that learns from rows: the policy before its training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict
from torch import Tensor

import rlite
from rlite import config
from rlite.engine.train import RliteTrainEngine
from rlite.trainer.losses import OwnLogprobs
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import FrozenModelOptions, ModelOptions, frozen_build_options


class Reference:
    """A frozen model beside the actor, or the actor without its adapters.

    Args:
        options: options of the reference.
        actor: options of the actor.
        engine: engine of the actor.
    """

    def __init__(self, options: FrozenModelOptions, actor: ModelOptions, engine: RliteTrainEngine) -> None:
        self._options, self._actor, self._actor_engine = options, actor, engine
        own = options.model_name or actor.model_name
        is_plain = own == actor.model_name and options.use_liger_kernel is None and not options.offload_model
        self.is_actor = actor.lora is not None and is_plain
        """the reference is the actor without its adapters"""
        self.engine = engine if self.is_actor else RliteTrainEngine(policy_module(own))

    def describe(self) -> str:
        """Return the reference in words."""
        own = self._options.model_name or self._actor.model_name
        return "reference: the model without its adapters" if self.is_actor else f"reference {own}"

    def build(self, build_options: Mapping[str, Any]) -> None:
        """Place the reference beside the actor, if it is a model of its own.

        Args:
            build_options: build options of the actor.
        """
        if self.is_actor:
            return
        own = config.inherit(self._options, self._actor)
        options = frozen_build_options(build_options, rlite.current_session().device)
        options["use_liger_kernel"] = own.use_liger_kernel
        self.engine.build(**options, colocate_with=self._actor_engine)
        if self._options.offload_model:
            self.engine.cpu()

    def logprobs(self, *batches: TensorDict) -> list[Tensor]:
        """Return the reference's log-probability of each token, [N, L] for each batch."""
        if self._options.offload_model:
            self.engine.cuda()
        found = [self.engine.forward(batch, OwnLogprobs(), without_adapters=self.is_actor) for batch in batches]
        if self._options.offload_model:
            self.engine.cpu()
        return found
