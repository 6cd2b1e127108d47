"""Ctrl-C and SIGTERM: the first signal saves a checkpoint at the end of the step, the second ends the run at once.

A third one ends the process itself, which may be busy with the end of the run.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM. Like Ctrl-C it is no Exception, so that code on the way does not catch it."""


NOT_BEGUN = "The run had not begun, and nothing was changed."


class Interruption:
    """Requests of this process's signals. A process has one instance: `INTERRUPTION`."""

    def __init__(self) -> None:
        self._is_followed = False
        self._may_wait = False
        self._asked: type[KeyboardInterrupt] | None = None
        self.advice = NOT_BEGUN
        """text that says how to continue after the signal"""

    def follow(self) -> None:
        """Handle this process's SIGINT and SIGTERM, except under torchrun.

        There a rank that waits for its peers could not hear of a signal, and torchrun's agent ends its ranks itself.
        """
        self._is_followed = "TORCHELASTIC_RUN_ID" not in os.environ
        self._install()

    def begin(self, advice: str) -> None:
        """Begin a run: from here on a signal waits for the end of the step.

        `advice` says how to continue afterwards.
        """
        self._may_wait = self._is_followed
        self.advice = advice
        self._install()  # what a launcher installed meanwhile would end the process at once

    def end(self) -> None:
        """End a run: a signal ends the process at once."""
        self._may_wait = False

    def release(self) -> None:
        """Stop handling signals."""
        self._is_followed = self._may_wait = False
        self._asked = None
        self.advice = NOT_BEGUN

    @property
    def is_asked(self) -> bool:
        """True if the run is to save and to end."""
        return self._asked is not None

    def obey(self) -> None:
        """Raise the delayed KeyboardInterrupt, if there is one."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            raise asked

    def _install(self) -> None:
        if self._is_followed:
            signal.signal(signal.SIGINT, self._handle)
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        error = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if self._asked is not None:
            signal.signal(
                number, signal.SIG_DFL
            )  # the end of millions of tasks takes long: one more signal cuts it off
            raise error
        if not self._may_wait:
            raise error
        self._asked = error
        text = "\nA checkpoint is saved at the end of this step; a second signal ends the run at once.\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())  # print is not reentrant


INTERRUPTION = Interruption()
