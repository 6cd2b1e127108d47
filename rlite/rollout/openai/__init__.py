"""Agents that are written for OpenAI's interface, as workflows: what their model reads and writes is recorded exactly.

agent ──request──> session: prompt from recorded tokens ──> engine
  ^                   │            │
  └────response───────┘            └──> recording: turns with tokens, log-probabilities, versions ──> trajectory
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlite.rollout.openai.client import AgentClient
    from rlite.rollout.openai.endpoint import Access, AgentEndpoint
    from rlite.rollout.openai.recording import Recording, Turn
    from rlite.rollout.openai.session import AgentSession
    from rlite.rollout.openai.workflow import AgentWorkflow

# lazy: the client needs the openai package, the endpoint aiohttp; the rest needs neither
_MODULES = {
    "rlite.rollout.openai.client": ("AgentClient",),
    "rlite.rollout.openai.endpoint": ("Access", "AgentEndpoint"),
    "rlite.rollout.openai.recording": ("Recording", "Turn"),
    "rlite.rollout.openai.session": ("AgentSession",),
    "rlite.rollout.openai.workflow": ("AgentWorkflow",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
