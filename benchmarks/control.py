"""Start of many workloads, the cost of a call on all beside bare Ray, detection, and pure parts at 10,000 workloads.

python -m benchmarks.control 48

Bounds: 48 workloads start in under 35 s; a call on all of them adds under 1 ms for each workload to bare Ray; a dead
process is found in under 5 s and a stopped one in under 10 s.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

import rlite
from rlite import files
from rlite.control import BaseTrainer, BaseWorkload, JobResult, RLJobBuilder
from rlite.control.spec import RLRoleType, RoleSpec, check_capacity, lay_out
from rlite.services.recovery.failover import (
    FailoverPolicy,
    JobState,
    RolePolicy,
    RoleState,
    WorkloadId,
    WorkloadsFailed,
    decide,
)

CALLS = 30
NUM_EVENTS = 4
"""events of an undisturbed job: submitted, ready, begins, finished"""

FAILURES = {"dead": signal.SIGKILL, "stopped": signal.SIGSTOP}
"""conditions, with the signals that cause them"""
SETTLE_S = 5.0
"""after which a new process is under observation"""


class Idle(BaseWorkload):
    def nothing(self) -> None: ...

    def pid(self) -> int:
        return os.getpid()


def median_ms(call: Any) -> float:
    spent = []
    for _ in range(CALLS):
        started = time.perf_counter()
        call()
        spent.append(time.perf_counter() - started)
    return 1e3 * statistics.median(spent)


class Meter(BaseTrainer):
    def init(self) -> None:
        self.begun = time.time()

    def fit(self) -> None:
        count = len(self.actors)
        self.RG_ACTOR.nothing()
        bare = median_ms(lambda: ray.get([actor.nothing.remote() for actor in self.actors]))
        group = median_ms(self.RG_ACTOR.nothing)
        result = {
            "workloads": count,
            "start_s": round(self.begun - self.config.submitted, 1),
            "bare_ray_ms": round(bare, 2),
            "role_group_ms": round(group, 2),
            "added_ms_per_workload": round((group - bare) / count, 3),
        }
        Path(self.config.out).write_text(json.dumps(result))


class Waiting(BaseTrainer):
    """Says who its workloads are, and waits to be stopped."""

    def init(self) -> None: ...

    def fit(self) -> None:
        files.replace(Path(self.config.out), json.dumps(self.RG_ACTOR.pid()).encode())
        time.sleep(3600.0)


def detection() -> dict[str, float]:
    """Seconds from a failure to the event in the log, by condition, with the default options."""
    found = {}
    for condition, number in FAILURES.items():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "pids.json"
            job = RLJobBuilder().device_per_node(2).device_type("CPU").trainer(Waiting).config({"out": str(out)})
            handle = job.actor(Idle).total(2).per_node(2).end().build().submit(f"detect-{condition}", blocking=False)
            while not out.exists():
                time.sleep(0.1)
            time.sleep(SETTLE_S)
            began = time.time()
            os.kill(json.loads(out.read_text())[1], number)
            while not (seen := [each for each in handle.record().log if f"ACTOR rank 1 {condition}" in each.event]):
                time.sleep(0.02)
            found[f"{condition}_s"] = round(seen[0].at - began, 2)
            handle.stop()
            handle.result(timeout=120.0)
    return found


def pure_parts() -> dict[str, float]:
    """Seconds of CPU time to place 10,000 workloads on 1,250 nodes, and of the median decision about one of them."""
    started = time.process_time()
    generating, criticising = (
        RoleSpec(workload="my:Workload", total=total, per_node=per_node) for total, per_node in ((4000, 4), (2000, 8))
    )
    sizes = {RLRoleType.ACTOR: generating, RLRoleType.ROLLOUT: generating}
    layout = lay_out({**sizes, RLRoleType.CRITIC: criticising}, [tuple(sizes)], 1250, 8)
    check_capacity(layout, [8] * 1250, "GPU")
    placed = time.process_time() - started
    policy = FailoverPolicy(roles={"ROLLOUT": RolePolicy("workload", 10**6)}, max_job_restarts=10**6)
    state = JobState(stage="RUNNING", roles={"ROLLOUT": RoleState(incarnations=dict.fromkeys(range(0, 10000, 10), 1))})
    spent = []
    for rank in range(1, 101, 2):
        failed = WorkloadsFailed(0.0, (WorkloadId("ROLLOUT", rank),), "dead", "node")
        started = time.process_time()
        decide(state, failed, policy)
        spent.append(time.process_time() - started)
    return {"placement_s": round(placed, 3), "decision_ms": round(1e3 * statistics.median(spent), 3)}


def main(count: int) -> None:
    print(json.dumps(pure_parts()))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        job = RLJobBuilder().device_per_node(count).device_type("CPU").trainer(Meter)
        job = job.config({"out": str(out), "submitted": time.time()}).actor(Idle).total(count).per_node(count).end()
        result = job.build().submit(job_name="benchmark")
        assert isinstance(result, JobResult)
        assert result.succeeded, result
        assert len(result.events) == NUM_EVENTS, result  # nothing failed meanwhile
        print(out.read_text(), flush=True)
        print(json.dumps(detection()))
        rlite.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
