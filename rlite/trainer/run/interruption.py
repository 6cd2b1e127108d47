"""Ctrl-C and SIGTERM: the first signal saves a checkpoint at the end of the step, the second ends the run at once.

A third one ends the process itself, which may be busy with the end of the run.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM. Like Ctrl-C it is no Exception, so that code on the way does not catch it."""


BEGUN = "RLITE_RUN_HAS_BEGUN"
"""variable of the environment by which a watcher says that it has started this program before"""
NOT_BEGUN = "The run had not begun, and nothing was changed."
AGAIN_S = 0.1
"""seconds after which a signal is sent again whose exception Python has ignored"""


def has_begun() -> bool:
    """Return True if an earlier start of this program had begun its run: it continues, and overwrites nothing."""
    return os.environ.get(BEGUN) == "1"


class Interruption:
    """Requests of this process's signals. A process has one instance: `INTERRUPTION`."""

    def __init__(self) -> None:
        self._is_followed = False
        self._may_wait = False
        self.asked: type[KeyboardInterrupt] | None = None
        """exception with which the run is to end after it was saved"""
        self.raised: type[KeyboardInterrupt] | None = None
        """exception of the last signal that has ended a wait; other code may have raised another in its place"""
        self._tell_ignored = sys.unraisablehook
        self.advice = NOT_BEGUN
        """text that says how to continue after the signal"""

    def follow(self) -> None:
        """Handle this process's SIGINT and SIGTERM, except under torchrun.

        There a rank that waits for its peers could not hear of a signal, and torchrun's agent ends its ranks itself.
        """
        self._is_followed = "TORCHELASTIC_RUN_ID" not in os.environ
        if self._is_followed and sys.unraisablehook != self._on_ignored:
            self._tell_ignored, sys.unraisablehook = sys.unraisablehook, self._on_ignored
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
        self.asked = self.raised = None
        self.advice = NOT_BEGUN
        sys.unraisablehook = self._tell_ignored

    def obey(self) -> None:
        """Raise the delayed KeyboardInterrupt, if there is one."""
        if self.asked is not None:
            asked, self.asked = self.asked, None
            raise asked

    def _install(self) -> None:
        if self._is_followed:
            signal.signal(signal.SIGINT, self._handle)
            signal.signal(signal.SIGTERM, self._handle)

    def _on_ignored(self, ignored: sys.UnraisableHookArgs) -> None:
        """Send a signal again that arrived in a finalizer or a hook of a fork, where Python ignores exceptions."""
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            number = signal.SIGTERM if issubclass(ignored.exc_type, Terminated) else signal.SIGINT
            _thread.start_new_thread(_send_soon, (number,))  # threading's locks may be held here
        else:
            self._tell_ignored(ignored)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        error = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if self.asked is not None:  # the end of millions of tasks takes long: one more signal cuts it off
            signal.signal(number, signal.SIG_DFL)
        if not self._may_wait or self.asked is not None:
            self.raised = error
            raise error
        self.asked = error
        text = "\nA checkpoint is saved at the end of this step; a second signal ends the run at once.\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())  # print is not reentrant


def _send_soon(number: int) -> None:
    time.sleep(AGAIN_S)
    os.kill(os.getpid(), number)


INTERRUPTION = Interruption()
