"""Agents that are written for OpenAI's interface, as workflows: what their model reads and writes is recorded exactly.

agent ──request──> session: prompt from recorded tokens ──> engine
  ^                   │            │
  └────response───────┘            └──> recording: turns with tokens, log-probabilities, versions ──> trajectory
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlite import imports

if TYPE_CHECKING:
    from rlite.services.endpoint.client import AgentClient
    from rlite.services.endpoint.endpoint import Access, AgentEndpoint
    from rlite.services.endpoint.recording import Recording, Turn
    from rlite.services.endpoint.session import AgentSession
    from rlite.services.endpoint.workflow import AgentWorkflow

# lazy: the client needs the openai package, the endpoint aiohttp; the rest needs neither
__all__, __getattr__, __dir__ = imports.exports(
    __name__,
    {
        "rlite.services.endpoint.client": "AgentClient",
        "rlite.services.endpoint.endpoint": "Access AgentEndpoint",
        "rlite.services.endpoint.recording": "Recording Turn",
        "rlite.services.endpoint.session": "AgentSession",
        "rlite.services.endpoint.workflow": "AgentWorkflow",
    },
)
