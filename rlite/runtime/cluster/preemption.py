"""SIGTERM as a notice: the process announces its end and continues for a grace period, in which its work can move."""

from __future__ import annotations

import os
import signal
import threading

from rlite.runtime.cluster.guard import end_at_sigterm


class TerminationNotice:
    """Waits for SIGTERM in a thread. The process ends when the grace period is over, even if it is busy.

    The signal's number arrives through a pipe that the C handler writes to. It is seen even while the main thread is in
    native code. Create it in the main thread.

    Args:
        grace_s: seconds from the signal to the end of the process.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._is_given = threading.Event()
        self._pipe, write = os.pipe()
        os.set_blocking(write, False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=end_at_sigterm)  # a forked child is not who was meant
        threading.Thread(target=self._listen, name="rlite-termination", daemon=True).start()

    def wait(self) -> None:
        """Return after SIGTERM."""
        self._is_given.wait()

    def _listen(self) -> None:
        while os.read(self._pipe, 1) != bytes([signal.SIGTERM]):
            continue
        self._is_given.set()
        threading.Event().wait(self._grace_s)
        end_at_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
