"""vLLM's schedulers with `Holding`. Imported in vLLM's processes alone."""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from rlite.backends.vllm.step_batching import Holding


class HoldingScheduler(Holding, Scheduler):
    """vLLM's scheduler, which sends the tokens of several steps at once."""


class AsyncHoldingScheduler(Holding, AsyncScheduler):
    """vLLM's scheduler for overlapping steps, which sends the tokens of several steps at once."""
