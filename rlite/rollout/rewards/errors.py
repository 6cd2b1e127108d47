"""Errors of rewards."""

from __future__ import annotations

from rlite.sandbox import errors as sandbox


class RewardError(sandbox.SandboxError):
    """A reward that could not be computed. `outcome` names the kind of failure in one word."""


class RewardTimeout(RewardError, sandbox.SandboxTimeout):
    """The function ran for longer than its time-out. Its process was killed."""


class RewardCrash(RewardError, sandbox.SandboxCrash):
    """The process ended during the call. The message has the exit code or the signal."""


class RewardMemory(RewardError, sandbox.SandboxMemory):
    """The process took more memory than its limit, or than the machine has."""


class RewardRaised(RewardError, sandbox.SandboxRaised):
    """The function raised an exception. The message begins with the exception and ends with its traceback."""


class RewardInvalid(RewardError, sandbox.SandboxInvalid):
    """The function returned something else than a finite number."""


REWARD_ERRORS = sandbox.error_kinds(RewardTimeout, RewardCrash, RewardMemory, RewardRaised, RewardInvalid)
