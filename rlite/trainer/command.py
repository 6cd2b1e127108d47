"""A trainer as a command: an error of ours is one readable message, a signal is an end that says how to go on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from rlite.errors import RliteError


def run(name: str, main: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> None:
    """Call `main`, and end the process with a message if it does not come to its end.

    Exit status: 1 for an error of ours; 130 and 143 for SIGINT and SIGTERM. Any other exception is a defect, or of code
    that is not ours, and keeps its traceback.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # a rank that waits for its peers could not hear of its agent's SIGTERM
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        main(arguments)
    except RliteError as error:
        # what a worker raised has its traceback there
        details = f"{error.__cause__}" if type(error.__cause__).__name__ == "RemoteTraceback" else ""
        sys.exit(f"rlite {name}: {type(error).__name__}: {error}{details}")
    except _Terminated:
        _leave(name, "SIGTERM", 143)
    except KeyboardInterrupt:
        _leave(name, "SIGINT", 130)


class _Terminated(KeyboardInterrupt):
    """SIGTERM; like Ctrl-C it is no Exception, which something on the way might catch."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _leave(name: str, signal_name: str, status: int) -> None:
    print(
        f"rlite {name}: ended by {signal_name}. What came after the newest checkpoint is not saved; the same command "
        "with trainer.load_ckpt_from=latest goes on from there.",
        file=sys.stderr,
    )
    sys.exit(status)
