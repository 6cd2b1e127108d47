"""Jobs of `benchmarks.faults`, on a Ray cluster of a head and two nodes on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError

import rlite
from benchmarks.faults_program import BATCH, SAVE_FREQ, Actor, Reward, Rollout, Trainer
from rlite.control import JobHandle, JobResult, RLJobBuilder
from rlite.control.job import job_of
from rlite.control.spec import HealthOptions, JobSpec
from rlite.errors import CallTimeout
from rlite.runtime.cluster.guard import marked
from rlite.runtime.cluster.host import CallPosition
from rlite.runtime.cluster.ray.fleet import NAMESPACE, Fleet
from rlite.services.record.files import ROWS, record_files
from rlite.testing import KINDS, PHASES, FaultBoard, Kind, Phase, PhaseFault
from tests.tiny import build_model_dir

CPUS = 3
"""CPUs of each node"""
NUM_NODES = 2
STUCK_S = 900.0
"""seconds in which a job must recover from a fault, on a busy machine"""
START_S = 300.0
"""in which workloads must start there"""
LEFT_S = 120.0
"""in which the processes of a job must be gone: Ray does not end a process that it is starting"""
AGENT_S, REPORT_S = 60.0, 1.5
"""in which the agent of a node is there, and has reported"""
MARK = "RLITE_FAULTS_JOB"
HEALTH = {"stopped_after": 1.0, "silent_after": 8.0, "hung_after": 10.0}
IDLE = "ray::IDLE"
"""a process of Ray's pool, which Ray started for the job and did not use"""
ENDLESS = 10**6
SIGNALS: tuple[Kind, ...] = ("SIGKILL", "SIGTERM", "SIGSTOP", "heartbeat", "master", "node")
"""restarts"""


class World:
    """The cluster. A node that is killed is replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.undisturbed: dict[Any, Any] = {}
        """results of jobs without faults"""

    def __enter__(self) -> World:
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._nodes = [self._cluster.add_node(num_cpus=CPUS) for _ in range(NUM_NODES)]
        self.address = self._cluster.address
        ray.init(address=self.address, logging_level="ERROR", log_to_driver=False)
        return self

    def __exit__(self, *exception: object) -> None:
        rlite.shutdown()
        ray.shutdown()
        self._cluster.shutdown()

    def model(self) -> Path:
        """A tiny checkpoint."""
        path = self.folder / "model"
        return path if path.exists() else build_model_dir(path, "qwen2", hidden=32, layers=1)

    def kill_node(self, node_id: str) -> None:
        """Kill a node, and start another; instead of the head, the first of the others."""
        sockets = {node["NodeID"]: node["ObjectStoreSocketName"] for node in ray.nodes() if node["Alive"]}
        found = [node for node in self._nodes if node.plasma_store_socket_name == sockets.get(node_id)]
        victim = found[0] if found else self._nodes[0]
        self._cluster.remove_node(victim, allow_graceful=False)
        self._nodes.remove(victim)
        self._nodes.append(self._cluster.add_node(num_cpus=CPUS))


class FaultJob(ABC):
    """A job that suffers faults, some steps for each."""

    kinds: Mapping[Phase, Sequence[Kind]]
    """possible faults, by phase"""
    roles: Mapping[Phase, Sequence[str]]
    """roles of the processes that reach a phase, by phase"""
    max_skip: Mapping[Phase, int]
    """visits of a phase before the fault, at most, so that the phase is visited again in the fault's steps"""
    steps_per_fault: int
    recovery_phase: Phase = "training step"
    """phase of the fault whose recovery is disturbed"""

    def __init__(self, world: World, name: str, num_faults: int) -> None:
        self.world, self.name, self.num_faults = world, name, num_faults
        self.out = world.folder / name
        self.out.mkdir()
        self.board = FaultBoard(self.out)
        self.mark = uuid.uuid4().hex
        self.handle: JobHandle

    @abstractmethod
    def submit(self, name: str, out: Path, mark: str) -> JobHandle:
        """Start the job with its results in a folder."""

    @abstractmethod
    def num_steps(self) -> int:
        """Steps that no fault can undo any more."""

    @abstractmethod
    def outcome(self, out: Path) -> Any:
        """Return the results that must equal those of the undisturbed job."""

    @abstractmethod
    def check(self) -> list[str]:
        """Problems of the job's result beside the weights."""

    @property
    def total_steps(self) -> int:
        return self.num_faults * self.steps_per_fault

    def begin(self, faults: Sequence[PhaseFault]) -> None:
        (self.out / "paced").write_text("")
        if faults[0].phase == "creation":
            self.board.arm(faults[0])
        self.handle = self.submit(self.name, self.out, self.mark)

    def suffer(self, number: int, fault: PhaseFault) -> tuple[float, str]:
        """Let a fault happen in the next steps; the seconds until the job is over it, and a problem."""
        if fault.phase == "recovery":
            self.board.arm(PhaseFault(phase=self.recovery_phase, kind="SIGKILL", role=fault.role))
        elif fault.phase != "creation":
            self.board.arm(fault)
        for step in range(number * self.steps_per_fault, (number + 1) * self.steps_per_fault):
            (self.out / f"go-{step}").write_text("")
        if fault.phase == "recovery":
            if not self._wait(lambda: not self.board.is_armed):
                return 0.0, "the first fault did not happen"
            self.board.arm(fault)
        is_hit = self._wait(lambda: not self.board.is_armed or self.num_steps() >= self._goal(number))
        if not is_hit or self.board.is_armed:
            self.board.disarm()
            return 0.0, "the fault did not happen"
        began = time.monotonic()
        if not self._wait(lambda: self.num_steps() >= self._goal(number)):
            return 0.0, f"no end of step {self._goal(number)} within {STUCK_S:g} s"
        return round(time.monotonic() - began, 2), ""

    def _goal(self, number: int) -> int:
        return (number + 1) * self.steps_per_fault

    def _wait(self, is_there: Any) -> bool:
        deadline = time.monotonic() + STUCK_S
        while not is_there():
            if time.monotonic() > deadline:
                return False
            if (request := self.board.request()) is not None:
                self._serve(request)
                self.board.serve()
            time.sleep(0.01)
        return True

    def _serve(self, request: Mapping[str, str]) -> None:
        """Make a fault from outside happen."""
        place = request["place"] or self._node_of_trainer()
        if request["kind"] == "node":
            self.world.kill_node(place)
        elif request["kind"] == "master":
            os.kill(_look(f"{self.name}/master").pid, signal.SIGKILL)
        else:
            deadline = time.monotonic() + AGENT_S
            while (agent := f"agent-{place}") not in Fleet(self.name).names():
                if time.monotonic() > deadline:
                    return
                time.sleep(0.1)
            pid = _look(f"{self.name}/{agent}").pid
            time.sleep(REPORT_S)
            os.kill(pid, signal.SIGSTOP)

    def _node_of_trainer(self) -> str:
        (name,) = [name for name in Fleet(self.name).names() if name.endswith("/TRAINER-0")]
        return _look(f"{self.name}/{name}").node

    def finish(self, broken: str) -> list[str]:
        """End the job; what is not as in the undisturbed job."""
        if broken:
            (self.out / "log").write_text("\n".join(map(str, self.handle.record().log)))
            self.handle.stop()
        try:
            result = self.handle.result(timeout=STUCK_S)
        except CallTimeout as error:
            return [str(error)]
        problems = self._left_over()
        if broken:
            print("\n".join(map(str, result.events[-40:])))
            return problems
        if not result.succeeded:
            print(result)
            return [f"the job failed: {result.error}", *problems]
        if self.outcome(self.out) != self._undisturbed():
            problems.append("not the result of the undisturbed job")
        return [*problems, *self.check()]

    def _undisturbed(self) -> Any:
        key = (type(self), self.total_steps)
        if key not in self.world.undisturbed:
            out = self.world.folder / f"whole-{type(self).__name__}-{self.total_steps}"
            out.mkdir()
            result = self.submit(out.name, out, uuid.uuid4().hex).result(timeout=STUCK_S)
            assert isinstance(result, JobResult)
            assert result.succeeded, result
            self.world.undisturbed[key] = self.outcome(out)
        return self.world.undisturbed[key]

    def _left_over(self) -> list[str]:
        deadline = time.monotonic() + LEFT_S
        while left := [*_processes(self.mark), *Fleet(self.name).names()]:
            if time.monotonic() > deadline:
                return [f"left over: {left}"]
            time.sleep(0.2)
        return []


class RolesJob(FaultJob):
    """Actors, rollout and reward workloads with a trainer that restarts alone."""

    kinds = dict.fromkeys(PHASES, KINDS)
    roles = {
        "creation": ["ACTOR", "ROLLOUT", "REWARD", "TRAINER"],
        "rollout": ["ROLLOUT", "TRAINER"],
        "reward": ["REWARD", "TRAINER"],
        "training step": ["ACTOR", "TRAINER"],
        "weight sync": ["ROLLOUT", "TRAINER"],
        "checkpoint": ["ACTOR", "TRAINER"],
        "recovery": ["ACTOR", "TRAINER"],
    }
    steps_per_fault = 4
    step_s = 0.0
    """shortest duration of a step's rollout"""
    max_skip = {"rollout": 2, "reward": 2, "training step": 2, "weight sync": 2, "checkpoint": 1}

    def submit(self, name: str, out: Path, mark: str) -> JobHandle:
        job = RLJobBuilder().node_num(NUM_NODES).device_per_node(CPUS).device_type("CPU").trainer(Trainer)
        job = job.config({"out": str(out), "seed": 7, "steps": self.total_steps, "step_s": self.step_s})
        job = job.global_env({MARK: mark, "OMP_NUM_THREADS": "1"})
        job = job.actor(Actor).total(2).per_node(1).on_failure("role", ENDLESS).end()
        job = job.rollout(Rollout).total(1).per_node(1).on_failure("workload", ENDLESS).end()
        job = job.reward(Reward).total(1).per_node(1).on_failure("workload", ENDLESS).end()
        job = job.options(
            backoff=1e-6, health=HEALTH, max_trainer_restarts=ENDLESS, max_node_faults=ENDLESS, start_timeout=START_S
        )
        handle = job.build().submit(name, blocking=False, job_max_restart=ENDLESS)
        assert isinstance(handle, JobHandle)
        return handle

    def num_steps(self) -> int:
        return _state(self.out)["step"]

    def outcome(self, out: Path) -> Any:
        state = _state(out)
        return state["digests"], state["weights"]

    def check(self) -> list[str]:
        used = _state(self.out)["used"]
        return [] if used == list(range(self.total_steps * BATCH)) else [f"samples were used: {used}"]


ENVIRONMENT = """
from rlite.testing import FaultBoard

async def step(state, action, extra_info):
    FaultBoard(extra_info["out"]).reach("reward", "SANDBOX")
    score = sum(letter.isalpha() for letter in action) / max(len(action), 1)
    return {"next_state": None, "reward": score, "score": score, "done": True, "extra_info": extra_info}
"""


class PpoJob(FaultJob):
    """The PPO trainer as a program, with rewards in processes of their own."""

    kinds = {**dict.fromkeys(PHASES, KINDS), "rollout": SIGNALS, "reward": ("SIGKILL", "SIGTERM")}
    roles = {**{phase: ["TRAINER"] for phase in PHASES}, "rollout": ["ROLLOUT"], "reward": ["SANDBOX"]}
    steps_per_fault = 4
    max_skip = {"rollout": 8, "reward": 8, "training step": 2, "weight sync": 2, "checkpoint": 1}

    def submit(self, name: str, out: Path, mark: str) -> JobHandle:
        (out / "env.py").write_text(ENVIRONMENT)
        rows = [{"prompt": f"{n}+{n}=", "out": str(out)} for n in range(64)]
        (out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {
            "actor": {"model_name": str(self.world.model()), "lr": 1e-3, "deterministic": True},
            "train_data": {"path": str(out / "prompts.jsonl"), "prompts_per_rollout": 2, "responses_per_prompt": 2},
            "rollout": {
                "env_path": str(out / "env.py"),
                "env_timeout": 20.0,
                "train_sampling_params": {"max_new_tokens": 8},
                "max_num_seqs": 3,
                "max_model_len": 32,
                "dtype": "float32",
                "deterministic": True,
            },
            "trainer": {"total_steps": self.total_steps, "save_freq": SAVE_FREQ, "save_dir": str(out / "run")},
        }
        spec = JobSpec(
            device_per_node=1,
            device_type="CPU",
            trainer="benchmarks.faults_ppo",
            config=options,
            global_env={MARK: mark, "OMP_NUM_THREADS": "1"},
            backoff=1e-6,
            health=HealthOptions(**HEALTH),
            max_trainer_restarts=ENDLESS,
        )
        handle = job_of(spec).submit(name, blocking=False, job_max_restart=ENDLESS)
        assert isinstance(handle, JobHandle)
        return handle

    def num_steps(self) -> int:
        saved = (self.out / "run" / "state").glob("step-*")
        return max((int(path.name.removeprefix("step-")) for path in saved), default=0)

    def outcome(self, out: Path) -> Any:
        weights = (out / "run" / "latest" / "model.safetensors").read_bytes()
        curve = [(row["step"], row["reward"], row["loss"]) for row in _rows(out / "run" / "metrics.jsonl")]
        samples = [
            {key: value for key, value in row.items() if "out" not in str(key)} for row in _recorded(out / "run")
        ]
        return hashlib.sha256(weights).hexdigest(), curve, str(samples).replace(str(out), "")

    def check(self) -> list[str]:
        return []  # the samples of each step are a part of the outcome


JOBS: dict[str, type[FaultJob]] = {"roles": RolesJob, "ppo": PpoJob}


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _recorded(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the rollouts, but for their times."""
    tables = [pq.read_table(file.path) for file in record_files(run) if file.kind == "rows"]
    timed = [name for name in ROWS.names if name.startswith("seconds_")] + ["ended", "events"]
    return [row for table in tables for row in table.drop_columns(timed).to_pylist()]


def _state(out: Path) -> dict[str, Any]:
    path = out / "state.json"
    return json.loads(path.read_text()) if path.exists() else {"step": 0}


def _look(actor: str) -> CallPosition:
    deadline = time.monotonic() + STUCK_S
    while True:
        try:
            return ray.get(ray.get_actor(actor, NAMESPACE).host_look.remote(), timeout=STUCK_S)
        except (RayActorError, ValueError):  # it is being restarted
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _processes(mark: str) -> list[str]:
    found = []
    for process in marked(mark, MARK):
        with suppress(psutil.NoSuchProcess):
            found.append(f"{process.pid} {process.name()}")
    return [each for each in found if not each.endswith(f" {IDLE}")]
