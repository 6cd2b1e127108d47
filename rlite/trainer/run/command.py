"""A trainer as a command: errors of rlite become one readable message, and signals say how to continue."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from rlite.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    FolderInUse,
    RemoteTraceback,
    RliteError,
    StorageError,
    why_not_written,
)
from rlite.recovery import reporting
from rlite.trainer.run.interruption import INTERRUPTION, Terminated

EXPLAINED = (ConfigError, DataError, CheckpointError, StorageError)
FINAL = (ConfigError, DataError, DivergedError)
"""errors that the same command meets again"""


def run(name: str, main: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> None:
    """Call `main`; if it fails, end the process with a message.

    The exit status is 1 for an error of rlite, and 130 or 143 for SIGINT or SIGTERM. Any other exception is a defect or
    comes from other code, and keeps its traceback.

    Args:
        name: name of the command.
        main: the command.
        arguments: its arguments.

    Raises:
        OSError: not caused by a full disk or a limit.
    """
    INTERRUPTION.follow()
    try:
        main(arguments)
    except RliteError as error:
        if isinstance(error, FINAL) and not isinstance(error, FolderInUse):
            reporting.report_final_error(error)
        # what a worker raised has its traceback there; these errors say all that a user can act on
        is_traced = isinstance(error.__cause__, RemoteTraceback) and not isinstance(error, EXPLAINED)
        details = f"{error.__cause__}" if is_traced else ""
        sys.exit(f"rlite {name}: {type(error).__name__}: {error}{details}")
    except OSError as error:
        if (reason := why_not_written(error)) == str(error):
            raise
        sys.exit(f"rlite {name}: {reason}{f': {error.filename}' if error.filename else ''}")
    except KeyboardInterrupt as error:
        ended_by, status = ("SIGTERM", 143) if isinstance(error, Terminated) else ("SIGINT", 130)
        print(f"rlite {name}: ended by {ended_by}. {INTERRUPTION.advice}", file=sys.stderr)
        sys.exit(status)
    finally:
        INTERRUPTION.release()
