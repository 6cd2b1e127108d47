"""False alarms: a job without a fault, whose workloads compute slowly and hold Python's lock for seconds at a time.

    python -m benchmarks.faults calm --minutes 30

Calls have a declared time-out that the workloads miss again and again, so the master has to tell late from hung. Every
event that is not a part of an undisturbed job is an alarm.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import rlite
from rlite.control import BaseTrainer, BaseWorkload, JobHandle, RLJobBuilder, trainer_invocation
from rlite.errors import CallTimeout
from rlite.services.recovery.record import LogEntry

NUM_WORKLOADS = 2
HELD_S = 5.0
"""CPU seconds for which a workload holds Python's lock at a time"""
TIMES = 6
"""number of holds in one call"""
DECLARED_S = 3.0
"""time-out of a call, which passes each time"""
CHUNK = 10**7
EVERY_S, WAIT_S = 5.0, 300.0
"""between two looks at the events, and for the job's last words"""
QUIET = ("job submitted", "workloads are ready", "trainer begins", "trainer finished")
LATE = (" is late: ", " answered late")


@dataclass(frozen=True)
class Calm:
    """Events of a job without a fault."""

    minutes: float
    calls: int
    late: int
    """notes that a call is late, or was answered late"""
    alarms: list[str]


class Slow(BaseWorkload):
    """A workload that computes in C code which does not release Python's lock."""

    def __init__(self, master_handle: object, config: object) -> None:
        super().__init__(master_handle, config)  # type: ignore[arg-type]
        began = time.process_time()
        sum(range(CHUNK))
        self.size = round(CHUNK * HELD_S / (time.process_time() - began))
        self.calls = 0

    @trainer_invocation(is_async=True, timeout=DECLARED_S)
    def compute(self) -> None:
        for _ in range(TIMES):
            sum(range(self.size))
        self.calls += 1

    def count(self) -> int:
        return self.calls


class Patient(BaseTrainer):
    """Calls the workloads until the time is up, and waits for late ones."""

    def init(self) -> None: ...

    def fit(self) -> None:
        ends = time.time() + self.config.seconds
        while time.time() < ends:
            try:
                self.RG_ACTOR.compute()
            except CallTimeout:
                print(f"calls so far: {self.RG_ACTOR.count()}", flush=True)  # no declared time-out: it waits


def measure(minutes: float) -> Calm:
    """Run the job for some minutes with the default health options, and print and count its events."""
    job = RLJobBuilder().device_per_node(NUM_WORKLOADS).device_type("CPU").trainer(Patient)
    job = job.config({"seconds": 60.0 * minutes}).actor(Slow).total(NUM_WORKLOADS).per_node(NUM_WORKLOADS).end()
    handle = job.build().submit("calm", blocking=False)
    assert isinstance(handle, JobHandle)
    events = _follow(handle)
    handle.result(timeout=WAIT_S)
    rlite.shutdown()
    late = [entry for entry in events if any(part in entry.event for part in LATE)]
    alarms = [str(entry) for entry in events if not any(part in entry.event for part in (*LATE, *QUIET))]
    calls = sum(LATE[0] in entry.event for entry in late) // NUM_WORKLOADS
    return Calm(minutes, calls, len(late), alarms)


def _follow(handle: JobHandle) -> list[LogEntry]:
    """Return the events of a job when it has ended, and print each as it comes."""
    events: list[LogEntry] = []
    while True:
        record = handle.record()
        for entry in record.log[len(events) :]:
            print(entry, flush=True)
        events = list(record.log)
        if record.state.has_ended:
            return events
        time.sleep(EVERY_S)
