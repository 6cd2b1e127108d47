"""Environments of other libraries as workflows: verifiers, TRL, OpenEnv and the Open Reward Standard.

verifiers      VerifiersWorkflow(VerifiersEnvironment(...))        tasksets and harnesses, in worker processes
TRL            ToolEnvironmentWorkflow(TrlEnvironment(...))        environment_factory, in worker processes
OpenEnv        GymWorkflow(OpenEnv(url)), ToolEnvironmentWorkflow(OpenEnvTools(url)), from_openenv(trace, reward)
ORS            ToolEnvironmentWorkflow(OrsEnvironment(url))        servers of openreward
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlite import imports

if TYPE_CHECKING:
    from rlite.rollout.environments.tool_episodes import ToolEnvironmentWorkflow, ToolEpisode
    from rlite.rollout.environments.trl import TrlEnvironment
    from rlite.rollout.rewards.groups import GroupReward
    from rlite.services.environments.contracts import contract_workflow
    from rlite.services.environments.openenv import OpenEnv, OpenEnvTools, from_openenv
    from rlite.services.environments.ors import OrsEnvironment
    from rlite.services.environments.verifiers import VerifiersEnvironment, VerifiersWorkflow

# lazy: servers and verifiers need aiohttp; the rest does not
__all__, __getattr__, __dir__ = imports.exports(
    __name__,
    {
        "rlite.rollout.environments.tool_episodes": "ToolEnvironmentWorkflow ToolEpisode",
        "rlite.rollout.environments.trl": "TrlEnvironment",
        "rlite.rollout.rewards.groups": "GroupReward",
        "rlite.services.environments.contracts": "contract_workflow",
        "rlite.services.environments.openenv": "OpenEnv OpenEnvTools from_openenv",
        "rlite.services.environments.ors": "OrsEnvironment",
        "rlite.services.environments.verifiers": "VerifiersEnvironment VerifiersWorkflow",
    },
)
