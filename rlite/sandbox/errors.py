"""Define errors of calls that run in a sandbox. Rewards, environments and tools have subclasses of their own."""

from __future__ import annotations

from collections.abc import Mapping

from rlite.errors import RliteError


class SandboxError(RliteError):
    """Failure of a call of user code. `outcome` names the kind of failure in one word."""

    outcome = "error"


class SandboxTimeout(SandboxError, TimeoutError):
    """Time-out of a call. Its process was killed."""

    outcome = "timeout"


class SandboxCrash(SandboxError, RuntimeError):
    """End of the process during the call. The message has the exit code or the signal."""

    outcome = "crash"


class SandboxMemory(SandboxError, MemoryError):
    """Use of more memory than the process's limit, or than the machine has."""

    outcome = "memory"


class SandboxRaised(SandboxError, RuntimeError):
    """Exception raised by the user code. The message begins with the exception and ends with its traceback."""

    outcome = "raised"


class SandboxInvalid(SandboxError, ValueError):
    """Return value of the wrong kind from the user code."""

    outcome = "invalid"


ErrorKinds = Mapping[str, type[SandboxError]]
"""the class that is raised for each outcome"""


def error_kinds(*classes: type[SandboxError]) -> ErrorKinds:
    """Return a table of error classes by their outcomes."""
    return {one.outcome: one for one in classes}


SANDBOX_ERRORS = error_kinds(SandboxTimeout, SandboxCrash, SandboxMemory, SandboxRaised, SandboxInvalid)
