"""Decide when a sandbox process is killed: after too much time or memory. Return the failure of its call.

The pool asks here after each wait, and kills the processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlite.sandbox.call import Call
from rlite.sandbox.process import Worker

LOAD_TIMEOUT = 120.0
"""seconds in which a process must be ready, and a function and its arguments loaded"""
SEND_TIMEOUT = 10.0
"""seconds in which an idle process must take a message, and judge its state after its last answer"""
MEMORY_INTERVAL = 0.02
"""seconds between two looks at the memory of processes that have a limit"""


class Failure(NamedTuple):
    """The end of the current call of a process that exceeds a limit."""

    outcome: str
    """timeout, memory; empty if the process itself failed, which is lost"""
    text: str


def deadline(worker: Worker) -> float:
    """Return the time of the monotonic clock, in seconds, by which a process must act next; infinity if it is idle."""
    if worker.is_idle:
        return float("inf")
    if worker.unsent or (worker.is_ready and not worker.calls):
        return worker.since + SEND_TIMEOUT
    return worker.since + (worker.calls[0].timeout if worker.is_computing else LOAD_TIMEOUT)


def seconds_to_next_check(workers: Sequence[Worker], now: float) -> float | None:
    """Return how long the pool may wait for processes; None if none has a limit."""
    patience = min(map(deadline, workers), default=float("inf")) - now
    if any(worker.calls and worker.calls[0].memory_limit is not None for worker in workers):
        patience = min(patience, MEMORY_INTERVAL)
    return None if patience == float("inf") else max(patience, 0.0)


def time_failure(worker: Worker, now: float) -> Failure | None:
    """Return the failure of a process that is over time, None if it is in time."""
    if deadline(worker) > now:
        return None
    if not worker.is_ready or worker.unsent or not worker.calls:
        return Failure("", f"was not ready in {LOAD_TIMEOUT:g} s")
    call = worker.calls[0]
    if worker.is_computing:
        return Failure("timeout", f"{call.code.what} ran for more than {call.timeout:g} s; its process was killed")
    return Failure("timeout", f"loading {call.code.what} or its arguments took more than {LOAD_TIMEOUT:g} s")


def memory_failure(worker: Worker) -> Failure | None:
    """Return the failure of a process whose resident memory exceeds its call's limit, None if it does not."""
    limit = worker.calls[0].memory_limit if worker.calls else None
    if limit is None or (memory := worker.memory()) <= limit:
        return None
    return out_of_memory(worker.calls[0], f"it took {memory / 2**30:.2f} GiB")


def out_of_memory(call: Call, how: str) -> Failure:
    """Return the failure of a call that took too much memory.

    Args:
        call: the call.
        how: the observed use of memory, for the message.
    """
    limit = "" if call.memory_limit is None else f" of at most {call.memory_limit / 2**30:g} GiB"
    return Failure("memory", f"{call.code.what} ran out of memory{limit}: {how}; its process was killed")
