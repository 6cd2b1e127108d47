"""Rollouts: workflows, rewards that can be killed, and the collector that runs them with bounded staleness."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlite import imports

if TYPE_CHECKING:
    from rlite.data.packs import check_trajectory
    from rlite.errors import RolloutError
    from rlite.rollout.collector.calls import RolloutCollector
    from rlite.rollout.collector.ledger import RolloutCounters, RolloutLedger, capacity
    from rlite.rollout.collector.options import CollectorOptions
    from rlite.rollout.conversation import Conversation, MultiTurnWorkflow, Transcript
    from rlite.rollout.environments.gym import GymEnvironment, GymWorkflow
    from rlite.rollout.environments.workflow import Environment, EnvironmentWorkflow
    from rlite.rollout.failures import (
        EnvironmentCrash,
        EnvironmentFailure,
        EnvironmentInvalid,
        EnvironmentMemory,
        EnvironmentRaised,
        EnvironmentTimeout,
        RewardCrash,
        RewardError,
        RewardInvalid,
        RewardMemory,
        RewardRaised,
        RewardTimeout,
    )
    from rlite.rollout.joined import pad_trajectories
    from rlite.rollout.rewards.adapters import from_trl, from_verl
    from rlite.rollout.rewards.function import RewardFunction
    from rlite.rollout.scripted import ScriptedEngine
    from rlite.rollout.seats import SeatsWorkflow, endpoint_player
    from rlite.rollout.tools.toolbox import Tool
    from rlite.rollout.tools.workflow import ToolUseWorkflow
    from rlite.rollout.workflow import RolloutWorkflow, SingleTurnWorkflow, trajectory
    from rlite.types import GenerationHyperparameters, LLMRequest, LLMResponse

# lazy, so that a reward process imports no torch
__all__, __getattr__, __dir__ = imports.exports(
    __name__,
    {
        "rlite.data.packs": "check_trajectory",
        "rlite.errors": "RolloutError",
        "rlite.rollout.conversation": "Conversation MultiTurnWorkflow Transcript",
        "rlite.rollout.collector.calls": "RolloutCollector",
        "rlite.rollout.collector.ledger": "RolloutCounters RolloutLedger capacity",
        "rlite.rollout.collector.options": "CollectorOptions",
        "rlite.rollout.environments.gym": "GymEnvironment GymWorkflow",
        "rlite.rollout.environments.workflow": "Environment EnvironmentWorkflow",
        "rlite.rollout.failures": (
            "EnvironmentCrash EnvironmentFailure EnvironmentInvalid EnvironmentMemory EnvironmentRaised "
            "EnvironmentTimeout RewardCrash RewardError RewardInvalid RewardMemory RewardRaised "
            "RewardTimeout"
        ),
        "rlite.rollout.joined": "pad_trajectories",
        "rlite.rollout.rewards.adapters": "from_trl from_verl",
        "rlite.rollout.rewards.function": "RewardFunction",
        "rlite.rollout.scripted": "ScriptedEngine",
        "rlite.rollout.seats": "SeatsWorkflow endpoint_player",
        "rlite.rollout.tools.toolbox": "Tool",
        "rlite.rollout.tools.workflow": "ToolUseWorkflow",
        "rlite.rollout.workflow": "RolloutWorkflow SingleTurnWorkflow trajectory",
        "rlite.types": "GenerationHyperparameters LLMRequest LLMResponse",
    },
)
