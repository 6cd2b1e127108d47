"""Goodput of a job that suffers a fault each minute: the time that it needs undisturbed, over the time that it takes.

    python -m benchmarks.faults goodput --minutes 5

The rollout of a step waits for as long as an accelerator would compute. The faults are drawn from all kinds, in all
phases of a step. The result has to be that of the undisturbed job.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults_jobs import RolesJob, World
from rlite.testing import KINDS, PHASES, PhaseFault

EVERY_S = 60.0
"""between two faults"""


@dataclass(frozen=True)
class Goodput:
    """Cost of faults."""

    faults: list[str]
    undisturbed_s: float
    """from the first checkpoint to the last step"""
    disturbed_s: float
    goodput: float
    lost_s_per_fault: float
    problems: list[str]


class LongStepsJob(RolesJob):
    """The job of roles, with steps of half a second."""

    step_s = 0.5
    steps_per_fault = round(EVERY_S / step_s)

    def play(self, faults: Iterator[PhaseFault]) -> tuple[list[str], float]:
        """Run the job, and return the faults that it suffered and its seconds."""
        self.handle = self.submit(self.name, self.out, self.mark)
        self._wait(lambda: self.num_steps() > 0)
        began, suffered = time.monotonic(), []
        while not self._is_done_within(EVERY_S) and (fault := next(faults, None)) is not None:
            self.board.arm(fault)
            suffered.append(str(fault))
        self._wait(self._is_done)
        return suffered, time.monotonic() - began

    def _is_done_within(self, seconds: float) -> bool:
        due = time.monotonic() + seconds
        self._wait(lambda: self._is_done() or time.monotonic() > due)
        return self._is_done()

    def _is_done(self) -> bool:
        return self.num_steps() >= self.total_steps


def draw_faults(seed: int) -> Iterator[PhaseFault]:
    """Faults of all kinds in turn, in phases by chance.

    Yields:
        The next fault.
    """
    numbers = random.Random(seed)
    phases = [phase for phase in PHASES if phase not in ("creation", "recovery")]
    while True:
        for kind in numbers.sample(KINDS, len(KINDS)):
            phase = numbers.choice(phases)
            yield PhaseFault(phase=phase, kind=kind, role=numbers.choice(RolesJob.roles[phase]))


def measure(minutes: float, seed: int) -> Goodput:
    """Run a job that takes some minutes undisturbed and with a fault each minute.

    Args:
        minutes: that the undisturbed job takes, at least 1.
        seed: seed of the faults.

    Returns:
        The cost of the faults.
    """
    num_faults = max(round(minutes), 1)
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder, World(Path(folder)) as world:
        undisturbed = LongStepsJob(world, "undisturbed", num_faults)
        _, whole_s = undisturbed.play(iter(()))
        world.undisturbed[LongStepsJob, undisturbed.total_steps] = undisturbed.outcome(undisturbed.out)
        problems = undisturbed.finish("")
        disturbed = LongStepsJob(world, "disturbed", num_faults)
        faults, seconds = disturbed.play(draw_faults(seed))
        problems += disturbed.finish("")
    lost_s = (seconds - whole_s) / max(len(faults), 1)
    return Goodput(
        faults, round(whole_s, 1), round(seconds, 1), round(whole_s / seconds, 3), round(lost_s, 1), problems
    )
