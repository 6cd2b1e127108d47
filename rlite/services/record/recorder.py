"""The recorder of a run: it chooses what is recorded, and writes it in the background."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tensordict import TensorDict

from rlite.rollout.collector.group import Ended
from rlite.services.record.files import TRAIN
from rlite.services.record.rollout_tables import TokenTexts, make_tables
from rlite.services.record.writer import RecordWriter

logger = logging.getLogger(__name__)
Amount = Literal["all", "sample", "none"]
"""amount that is recorded: everything; a row of every rollout, and some texts and tokens; nothing"""
NUM_GROUPS = 2
"""groups of each status whose texts and tokens are in a sample of a step"""
NUM_PROMPTS = 8
"""prompts of an evaluation whose texts and tokens are in a sample"""
WHOLE_EVERY = 10
"""steps between two steps of which a sample has the texts and tokens of all groups; step 1 is the first"""


class NoRecorder:
    """Recorder that records nothing."""

    has_removed = False

    def record(self, *of_step: object) -> None:
        """Do nothing."""

    def record_evaluation(self, *of_set: object) -> None:
        """Do nothing."""

    def compact(self, before: int) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class FileRecorder:
    """Recorder that writes the files of `rlite.services.record`. It ends if a step cannot be written.

    Args:
        folder: the run's folder.
        tokenizer: the model's tokenizer, which is copied.
        is_whole: record the texts and tokens of all groups.
        limit: bytes on disk.
    """

    def __init__(self, folder: Path, tokenizer: Any, is_whole: bool, limit: int) -> None:
        self._texts = TokenTexts(copy.deepcopy(tokenizer))
        self._is_whole = is_whole
        self._has_warned = False
        self._writer = RecordWriter(folder, limit)

    @property
    def has_removed(self) -> bool:
        """True as soon as old texts and tokens were removed because of the limit."""
        return self._writer.has_removed

    def record(self, step: int, groups: Sequence[Ended], batch: TensorDict | None = None) -> None:
        """Record the end of groups in a step of training.

        Args:
            step: step of the run.
            groups: none has the status None.
            batch: the batch that was trained on.
        """
        ordered = sorted(groups, key=lambda group: group.group)
        shown = range(len(ordered)) if self._is_whole else sampled(step, ordered)
        if ordered:
            self._writer.write(TRAIN, step, lambda: make_tables(step, ordered, self._texts, shown, batch, self._warn))

    def record_evaluation(self, name: str, step: int, episodes: Sequence[Ended]) -> None:
        """Record an evaluation.

        Args:
            name: name of the data set.
            step: finished steps of the run.
            episodes: what `RolloutCollector.evaluate` returned.
        """
        is_shown = [self._is_whole or episode.group < NUM_PROMPTS for episode in episodes]
        shown = {place for place, is_one in enumerate(is_shown) if is_one}
        self._writer.write(
            f"eval.{name}", step, lambda: make_tables(step, episodes, self._texts, shown, None, self._warn)
        )

    def compact(self, before: int) -> None:
        """Merge the files of full hundreds of steps before step `before`."""
        self._writer.compact(before)

    def flush(self) -> None:
        """Wait until everything is on disk."""
        self._writer.flush()

    def close(self) -> None:
        """Wait until everything is on disk, and end the thread."""
        self._writer.close()

    def _warn(self, message: str) -> None:
        """Log the first trajectory that is not recorded; thousands may follow."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s; further ones are not reported", message)


Recorder = FileRecorder | NoRecorder


def sampled(step: int, groups: Sequence[Ended]) -> set[int]:
    """Return the places of the groups whose texts and tokens are in a sample of a step.

    These are the first groups of each status, and all groups of every tenth step, from step 1 on.
    """
    if step % WHOLE_EVERY == 1:
        return set(range(len(groups)))
    seen: Counter[str | None] = Counter()
    shown = set()
    for place, group in enumerate(groups):
        seen[group.status] += 1
        if seen[group.status] <= NUM_GROUPS:
            shown.add(place)
    return shown


def make_recorder(folder: Path, tokenizer: Any, amount: Amount, limit: int) -> Recorder:
    """Return the recorder of a run.

    Args:
        folder: the run's folder.
        tokenizer: the model's tokenizer.
        amount: what is recorded.
        limit: bytes on disk.
    """
    return NoRecorder() if amount == "none" else FileRecorder(folder, tokenizer, amount == "all", limit)
