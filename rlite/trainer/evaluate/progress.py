"""Progress of an evaluation on the standard error: on a terminal a line that changes, in a file a line every 10 s."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlite.observability.console import ConsoleReporter

QUIET_S = 10.0
"""seconds between two lines in a file or a pipe"""


@contextmanager
def showing_progress(progress: Callable[[], str]) -> Iterator[None]:
    """Show the progress of the evaluation until the end of the block.

    Args:
        progress: returns it in words; called in another thread.

    Yields:
        None.
    """
    console = ConsoleReporter(file=sys.stderr, quiet_s=QUIET_S)
    console.follow(progress)
    try:
        yield
    finally:
        console.close()


def continuing(name: str, num_there: int, num_expected: int, what: str) -> None:
    """Print that an evaluation continues, if a part of it exists.

    Args:
        name: name of the model.
        num_there: parts that an earlier command has written.
        num_expected: parts of the whole evaluation.
        what: the parts, such as "samples".
    """
    if num_there:
        print(f"{name}: continuing: {num_there} of {num_expected} {what} are there", file=sys.stderr, flush=True)
