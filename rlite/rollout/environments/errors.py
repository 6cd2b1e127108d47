"""Define errors of environments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlite.errors import shortened
from rlite.sandbox import errors as sandbox


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


@contextmanager
def noting(turn: int, action: str) -> Iterator[None]:
    """Add the turn and the action to a failure of the environment inside of the block.

    Args:
        turn: number of the turn, from 1.
        action: text that the model has written.

    Yields:
        None.

    Raises:
        EnvironmentFailure: the failure, with a note.
    """
    try:
        yield
    except EnvironmentFailure as error:
        error.add_note(f"turn {turn}, action: {shortened(action)}")
        raise
