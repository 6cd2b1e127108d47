"""Start of many workloads, the cost of a call on all beside bare Ray, and the pure parts at 10,000 workloads.

python -m benchmarks.control 48
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

import rlite
from rlite.control import BaseTrainer, BaseWorkload, RLJobBuilder
from rlite.control.layout import RoleSize, check_capacity, lay_out
from rlite.control.roles import RLRoleType
from rlite.recovery.failover import (
    FailoverPolicy,
    JobState,
    RolePolicy,
    RoleState,
    WorkloadId,
    WorkloadsFailed,
    decide,
)

CALLS = 30


class Idle(BaseWorkload):
    def nothing(self) -> None: ...


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


def pure_parts() -> dict[str, float]:
    """Seconds of CPU time to place 10,000 workloads on 1,250 nodes, and of the median decision about one of them."""
    started = time.process_time()
    sizes = {RLRoleType.ACTOR: RoleSize(4000, 4), RLRoleType.ROLLOUT: RoleSize(4000, 4)}
    layout = lay_out({**sizes, RLRoleType.CRITIC: RoleSize(2000, 8)}, [tuple(sizes)], 1250, 8)
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
        assert result.succeeded, result  # type: ignore[union-attr]
        print(out.read_text())
        rlite.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
