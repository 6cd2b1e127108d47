"""Define errors of rewards."""

from __future__ import annotations

from rlite.sandbox import errors as sandbox


class RewardError(sandbox.SandboxError):
    """Failure to compute a reward. `outcome` names the kind of failure in one word."""


class RewardTimeout(RewardError, sandbox.SandboxTimeout):
    """Time-out of the function. Its process was killed."""


class RewardCrash(RewardError, sandbox.SandboxCrash):
    """End of the process during the call. The message has the exit code or the signal."""


class RewardMemory(RewardError, sandbox.SandboxMemory):
    """Use of more memory than the process's limit, or than the machine has."""


class RewardRaised(RewardError, sandbox.SandboxRaised):
    """Exception raised by the function. The message begins with the exception and ends with its traceback."""


class RewardInvalid(RewardError, sandbox.SandboxInvalid):
    """Result of the function that is not a finite number."""


REWARD_ERRORS = sandbox.error_kinds(RewardTimeout, RewardCrash, RewardMemory, RewardRaised, RewardInvalid)
