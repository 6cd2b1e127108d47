"""Faults that can hit a phase of a run, as plain data. `rlite.recovery.faultpoints` makes them happen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["creation", "rollout", "reward", "training step", "weight sync", "checkpoint", "recovery"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""phases of a run, in the order of a step; recovery is everything between a failure and the next phase"""
Kind = Literal["SIGKILL", "SIGTERM", "SIGSTOP", "raise", "heartbeat", "master", "node"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""three signals to the process that is in the phase, an error that it raises, heartbeats of its node that are lost, the
killed master of its job, its killed Ray node"""


@dataclass(frozen=True, kw_only=True)
class PhaseFault:
    """A fault that happens while a process is in a phase of its run. `rlite.recovery.faultpoints` makes it happen."""

    phase: Phase
    kind: Kind
    role: str
    """role of the process, in the program's own words; "" is any"""
    skip: int = 0
    """visits of the phase before the fault"""

    def __str__(self) -> str:
        return f"{self.kind} in {self.phase} of {self.role or 'any process'}"
