"""Agents that are written for OpenAI's interface, as workflows: what their model reads and writes is recorded exactly.

agent ──request──> session: prompt from recorded tokens ──> engine
  ^                   │            │
  └────response───────┘            └──> recording: turns with tokens, log-probabilities, versions ──> trajectory
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlite import lazy

if TYPE_CHECKING:
    from rlite.rollout.openai.client import AgentClient
    from rlite.rollout.openai.endpoint import Access, AgentEndpoint
    from rlite.rollout.openai.recording import Recording, Turn
    from rlite.rollout.openai.session import AgentSession
    from rlite.rollout.openai.workflow import AgentWorkflow

# lazy: the client needs the openai package, the endpoint aiohttp; the rest needs neither
__all__, __getattr__, __dir__ = lazy.exports()
