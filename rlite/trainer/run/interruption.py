"""Ctrl-C and SIGTERM: the first signal saves a checkpoint at the end of the step, the second ends the run at once."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM; like Ctrl-C it is no Exception, which something on the way might catch."""


NOT_BEGUN = "The run had not begun, and nothing was changed."


class Interruption:
    """What the signals of this process asked for. A process has one: `INTERRUPTION`."""

    def __init__(self) -> None:
        self._is_followed = False
        self._may_wait = False
        self._asked: type[KeyboardInterrupt] | None = None
        self.advice = NOT_BEGUN
        """how to go on after the signal, in words"""

    def follow(self) -> None:
        """Take over this process's SIGINT and SIGTERM.

        Not under torchrun: a rank that waits for its peers could not hear of a signal, and torchrun's agent ends its
        ranks with it.
        """
        self._is_followed = "TORCHELASTIC_RUN_ID" not in os.environ
        self._install()

    def begin(self, advice: str) -> None:
        """A run is under way: from here on a signal waits for the end of the step. `advice` says how to go on then."""
        self._may_wait = self._is_followed
        self.advice = advice
        self._install()  # what a launcher installed meanwhile would end the process at once

    def end(self) -> None:
        """No run is under way: a signal ends the process at once."""
        self._may_wait = False

    def release(self) -> None:
        """No run of this process waits for signals any more."""
        self._is_followed = self._may_wait = False
        self._asked = None
        self.advice = NOT_BEGUN

    @property
    def is_asked(self) -> bool:
        """Whether the run is to save and to end."""
        return self._asked is not None

    def obey(self) -> None:
        """Raise the KeyboardInterrupt that was held back, if there is one."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            raise asked

    def _install(self) -> None:
        if self._is_followed:
            signal.signal(signal.SIGINT, self._handle)
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        error = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if not self._may_wait or self._asked is not None:
            raise error
        self._asked = error
        text = "\nA checkpoint is saved at the end of this step; a second signal ends the run at once.\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())  # print may not be entered twice


INTERRUPTION = Interruption()
