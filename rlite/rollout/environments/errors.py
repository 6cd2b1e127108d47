"""Errors of environments."""

from __future__ import annotations

from rlite.sandbox import errors as sandbox


class EnvironmentFailure(sandbox.SandboxError):
    """A call of an environment that has no result. `outcome` names the kind of failure in one word."""


class EnvironmentTimeout(EnvironmentFailure, sandbox.SandboxTimeout):
    """The call ran for longer than its time-out. Its process was killed."""


class EnvironmentCrash(EnvironmentFailure, sandbox.SandboxCrash):
    """The process ended during the call. The message has the exit code or the signal."""


class EnvironmentMemory(EnvironmentFailure, sandbox.SandboxMemory):
    """The process took more memory than its limit, or than the machine has."""


class EnvironmentRaised(EnvironmentFailure, sandbox.SandboxRaised):
    """The environment raised an exception, or returned something of the wrong form."""


class EnvironmentInvalid(EnvironmentFailure, sandbox.SandboxInvalid):
    """The process answered something else than a turn."""


ENVIRONMENT_ERRORS = sandbox.error_kinds(
    EnvironmentTimeout, EnvironmentCrash, EnvironmentMemory, EnvironmentRaised, EnvironmentInvalid
)
