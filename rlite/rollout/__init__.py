"""Rollouts: workflows, rewards that can be killed, and the collector that runs them with bounded staleness."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlite import lazy

if TYPE_CHECKING:
    from rlite.rollout.batch import check_trajectory, pad_trajectories
    from rlite.rollout.collector import RolloutCollector
    from rlite.rollout.conversation import Conversation
    from rlite.rollout.env import Environment, EnvironmentWorkflow
    from rlite.rollout.gym import GymEnvironment, GymWorkflow
    from rlite.rollout.multi_turn import MultiTurnWorkflow
    from rlite.rollout.options import CollectorOptions
    from rlite.rollout.rewards import (
        RewardCrash,
        RewardError,
        RewardFunction,
        RewardInvalid,
        RewardMemory,
        RewardRaised,
        RewardTimeout,
        from_trl,
        from_verl,
    )
    from rlite.rollout.scripted import ScriptedEngine
    from rlite.rollout.staleness import RolloutCounters, RolloutLedger, capacity
    from rlite.rollout.tool_use import ToolUseWorkflow
    from rlite.rollout.tools import Tool
    from rlite.rollout.transcript import Transcript
    from rlite.rollout.workflow import RolloutError, RolloutWorkflow, SingleTurnWorkflow, trajectory
    from rlite.types import GenerationHyperparameters, LLMRequest, LLMResponse

# lazy, so that a reward process imports no torch
__all__, __getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "rlite.rollout.batch": "check_trajectory pad_trajectories",
        "rlite.rollout.collector": "RolloutCollector",
        "rlite.rollout.conversation": "Conversation",
        "rlite.rollout.env": "Environment EnvironmentWorkflow",
        "rlite.rollout.gym": "GymEnvironment GymWorkflow",
        "rlite.rollout.multi_turn": "MultiTurnWorkflow",
        "rlite.rollout.options": "CollectorOptions",
        "rlite.rollout.rewards": (
            "RewardCrash RewardError RewardFunction RewardInvalid RewardMemory RewardRaised RewardTimeout from_trl "
            "from_verl"
        ),
        "rlite.rollout.scripted": "ScriptedEngine",
        "rlite.rollout.staleness": "RolloutCounters RolloutLedger capacity",
        "rlite.rollout.tool_use": "ToolUseWorkflow",
        "rlite.rollout.tools": "Tool",
        "rlite.rollout.transcript": "Transcript",
        "rlite.rollout.workflow": "RolloutError RolloutWorkflow SingleTurnWorkflow trajectory",
        "rlite.types": "GenerationHyperparameters LLMRequest LLMResponse",
    },
)
