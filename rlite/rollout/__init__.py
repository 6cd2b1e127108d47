"""Rollouts: workflows, rewards that can be killed, and the collector that runs them with bounded staleness."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlite import lazy

if TYPE_CHECKING:
    from rlite.rollout.chat.conversation import Conversation
    from rlite.rollout.chat.retries import MultiTurnWorkflow
    from rlite.rollout.chat.transcript import Transcript
    from rlite.rollout.collector.collector import RolloutCollector
    from rlite.rollout.collector.ledger import RolloutCounters, RolloutLedger, capacity
    from rlite.rollout.collector.options import CollectorOptions
    from rlite.rollout.environments.errors import (
        EnvironmentCrash,
        EnvironmentFailure,
        EnvironmentInvalid,
        EnvironmentMemory,
        EnvironmentRaised,
        EnvironmentTimeout,
    )
    from rlite.rollout.environments.gym import GymEnvironment, GymWorkflow
    from rlite.rollout.environments.step import Environment, EnvironmentWorkflow
    from rlite.rollout.rewards.adapters import from_trl, from_verl
    from rlite.rollout.rewards.errors import (
        RewardCrash,
        RewardError,
        RewardInvalid,
        RewardMemory,
        RewardRaised,
        RewardTimeout,
    )
    from rlite.rollout.rewards.function import RewardFunction
    from rlite.rollout.scripted import ScriptedEngine
    from rlite.rollout.tools.toolbox import Tool
    from rlite.rollout.tools.workflow import ToolUseWorkflow
    from rlite.rollout.trajectories import check_trajectory, pad_trajectories
    from rlite.rollout.workflow import RolloutError, RolloutWorkflow, SingleTurnWorkflow, trajectory
    from rlite.types import GenerationHyperparameters, LLMRequest, LLMResponse

# lazy, so that a reward process imports no torch
__all__, __getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "rlite.rollout.trajectories": "check_trajectory pad_trajectories",
        "rlite.rollout.collector.collector": "RolloutCollector",
        "rlite.rollout.chat.conversation": "Conversation",
        "rlite.rollout.environments.errors": (
            "EnvironmentCrash EnvironmentFailure EnvironmentInvalid EnvironmentMemory EnvironmentRaised "
            "EnvironmentTimeout"
        ),
        "rlite.rollout.environments.step": "Environment EnvironmentWorkflow",
        "rlite.rollout.environments.gym": "GymEnvironment GymWorkflow",
        "rlite.rollout.chat.retries": "MultiTurnWorkflow",
        "rlite.rollout.collector.options": "CollectorOptions",
        "rlite.rollout.rewards.adapters": "from_trl from_verl",
        "rlite.rollout.rewards.errors": (
            "RewardCrash RewardError RewardInvalid RewardMemory RewardRaised RewardTimeout"
        ),
        "rlite.rollout.rewards.function": "RewardFunction",
        "rlite.rollout.scripted": "ScriptedEngine",
        "rlite.rollout.collector.ledger": "RolloutCounters RolloutLedger capacity",
        "rlite.rollout.tools.workflow": "ToolUseWorkflow",
        "rlite.rollout.tools.toolbox": "Tool",
        "rlite.rollout.chat.transcript": "Transcript",
        "rlite.rollout.workflow": "RolloutError RolloutWorkflow SingleTurnWorkflow trajectory",
        "rlite.types": "GenerationHyperparameters LLMRequest LLMResponse",
    },
)
