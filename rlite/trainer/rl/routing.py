"""Replay of chosen experts in the training of a mixture: the engine's choice, the trainer's own, or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.algorithms import TokenLogprobs
from rlite.data.routing import ROUTED, RoutingShape, check_routing
from rlite.engine.inference import RliteInferenceEngine
from rlite.errors import ConfigError, DataError
from rlite.nn.base import BaseTrainModule
from rlite.rollout import RolloutWorkflow
from rlite.runtime.cluster.session import default_options
from rlite.trainer.rl.objective import BothLogprobs
from rlite.types import RoutingSource

OPTION = "actor.routing_replay"


@dataclass(frozen=True)
class RoutingReplay:
    """The experts that are replayed in a run."""

    source: RoutingSource = "off"
    reason: str = ""
    """why this source; "" if the model has no experts"""
    shape: RoutingShape | None = None
    """form of the model's choices, if any are replayed"""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """options of `build` that let the engine return its choices"""

    @classmethod
    def of(cls, asked: RoutingSource, module: BaseTrainModule, engine: RliteInferenceEngine) -> RoutingReplay:
        """Return what is replayed."""
        shape = module.routing_shape()
        if asked == "off" or (asked == "auto" and shape is None):
            return cls(reason=f"{OPTION}=off" if shape is not None else "")
        problem, remedy, options = module.replay_obstacle(), "use off or auto", {}
        if problem is None and asked != "old_policy":
            try:
                options = engine.capabilities.options_for(ROUTED, default_options(engine.executor_name))
            except ConfigError as error:
                told = f"rollout.executor={engine.executor_name} does not return the experts that it chose"
                problem, remedy = f"{told} ({error})", "use rollout.executor=torch, old_policy or auto"
        if problem is None:
            source = "rollout" if asked == "auto" else asked
            reason = "the engine returns them" if asked == "auto" else f"{OPTION}={asked}"
            return cls(source, reason, shape, options)
        if asked == "auto":
            return cls(reason=problem)
        raise ConfigError(f"{OPTION}={asked}: {problem}; {remedy}")

    @property
    def extras(self) -> tuple[str, ...]:
        """Columns that training requests ask the engine for."""
        return (ROUTED,) if self.source == "rollout" else ()

    def check(self, batch: TensorDict, workflow: RolloutWorkflow) -> float:
        """Check the experts that the engine has recorded for a batch of rollouts.

        Returns the share of tokens whose experts were recorded.
        """
        assert self.shape is not None
        if ROUTED not in batch:
            raise DataError(
                f"{OPTION}=rollout: the trajectories of {type(workflow).__name__} have no {ROUTED}. Build them with "
                "trajectory(response) or TokenHistory.add(response), which keep the engine's, or use old_policy or off"
            )
        return check_routing(batch, self.shape)

    def topic(self) -> dict[str, str]:
        """Return what is replayed and why, as a topic of the plan; {} for a model without experts."""
        texts = {"rollout": "the engine's choice of experts", "old_policy": "the choice before the update"}
        return {"routing replay": f"{texts.get(self.source, 'off')} ({self.reason})"} if self.reason else {}


NO_REPLAY = RoutingReplay()


class RecordedLogprobs(BothLogprobs):
    """A post_hook for `forward` that returns two log-probabilities of each token, and the experts of each layer."""

    records_routing: ClassVar[bool] = True

    def __call__(self, tokens: TokenLogprobs, data: Mapping[str, Any]) -> Tensor:
        """Return the bytes [T, 8 + B] of two float32 log-probabilities and of `routed_experts`; see `BothLogprobs`."""
        both = super().__call__(tokens, data).float().contiguous().view(torch.uint8)
        return torch.cat([both, data[ROUTED]], dim=-1)

    @staticmethod
    def parts(found: Tensor) -> tuple[Tensor, Tensor]:
        """Return two log-probabilities [N, L, 2], and `routed_experts` [N, L, B], of the results of all packs."""
        both, routed = found[..., :8].contiguous(), found[..., 8:].contiguous()
        return both.view(torch.float32), routed
