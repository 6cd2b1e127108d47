"""Failures of the user's rewards and environments: the outcomes of `rlite.runtime.sandbox.calls` under own names.

The model reads failures of tools as texts, so that they need no names. Sandbox processes load this module: it imports
no torch.
"""

from __future__ import annotations

from rlite.runtime.sandbox import calls as sandbox


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


class EnvironmentFailure(sandbox.SandboxError):
    """Failure of a call of an environment. `outcome` names the kind of failure in one word."""


class EnvironmentTimeout(EnvironmentFailure, sandbox.SandboxTimeout):
    """Time-out of the call. Its process was killed."""


class EnvironmentCrash(EnvironmentFailure, sandbox.SandboxCrash):
    """End of the process during the call. The message has the exit code or the signal."""


class EnvironmentMemory(EnvironmentFailure, sandbox.SandboxMemory):
    """Use of more memory than the process's limit, or than the machine has."""


class EnvironmentRaised(EnvironmentFailure, sandbox.SandboxRaised):
    """Exception raised by the environment, or a return value of the wrong form."""


class EnvironmentInvalid(EnvironmentFailure, sandbox.SandboxInvalid):
    """Answer of the process that is not a turn."""


ENVIRONMENT_ERRORS = sandbox.error_kinds(
    EnvironmentTimeout, EnvironmentCrash, EnvironmentMemory, EnvironmentRaised, EnvironmentInvalid
)
