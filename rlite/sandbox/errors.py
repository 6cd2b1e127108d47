"""Errors of calls that run in a sandbox. Rewards, environments and tools have subclasses of their own."""

from __future__ import annotations

from collections.abc import Mapping

from rlite.errors import RliteError


class SandboxError(RliteError):
    """A call of user code that has no result. `outcome` names the kind of failure in one word."""

    outcome = "error"


class SandboxTimeout(SandboxError, TimeoutError):
    """The call ran for longer than its time-out. Its process was killed."""

    outcome = "timeout"


class SandboxCrash(SandboxError, RuntimeError):
    """The process ended during the call. The message has the exit code or the signal."""

    outcome = "crash"


class SandboxMemory(SandboxError, MemoryError):
    """The process took more memory than its limit, or than the machine has."""

    outcome = "memory"


class SandboxRaised(SandboxError, RuntimeError):
    """The user code raised an exception. The message begins with the exception and ends with its traceback."""

    outcome = "raised"


class SandboxInvalid(SandboxError, ValueError):
    """The user code returned a value of the wrong kind."""

    outcome = "invalid"


ErrorKinds = Mapping[str, type[SandboxError]]
"""the class that is raised for each outcome"""


def error_kinds(*classes: type[SandboxError]) -> ErrorKinds:
    """Return a table of error classes by their outcomes."""
    return {one.outcome: one for one in classes}


SANDBOX_ERRORS = error_kinds(SandboxTimeout, SandboxCrash, SandboxMemory, SandboxRaised, SandboxInvalid)
