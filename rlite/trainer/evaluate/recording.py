"""The record of an evaluation that is under way, for readers of its folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlite.errors import RliteError
from rlite.evaluation.rows import write_record
from rlite.trainer.evaluate.models import Candidate, rows_of

PAUSE_S = 0.5
"""least seconds between two versions of the record"""
COST = 0.05
"""share of the time that goes into the record, which is longer to write the more samples it has"""


@contextmanager
def recorded(candidate: Candidate, folder: Path) -> Iterator[None]:
    """Keep the record of a model up to date during the block, and write it once more at the end of the block.

    Each version of the record is made of the whole journal, so that no sample is in it twice. After a kill, the record
    lacks the samples that have ended since its last version. The continued evaluation writes it again.

    Args:
        candidate: the model, whose journal grows.
        folder: folder of the evaluation.

    Yields:
        None.
    """
    stopped = threading.Event()
    thread = threading.Thread(target=_follow, args=(candidate, folder, stopped), name="eval-record", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        with suppress(RliteError):  # the block's own error counts, or the next error of the same cause
            write_record(folder, candidate.name, rows_of(candidate))


def _follow(candidate: Candidate, folder: Path, stopped: threading.Event) -> None:
    num_written, pause = 0, 0.0
    while not stopped.wait(pause):
        begun = time.monotonic()
        if len(candidate.lines) > num_written:
            num_written = len(candidate.lines)
            try:
                write_record(folder, candidate.name, rows_of(candidate))
            except RliteError:
                return  # the record that is written at the end raises it; until then only readers lack something
        pause = max(PAUSE_S, (time.monotonic() - begun) / COST)
