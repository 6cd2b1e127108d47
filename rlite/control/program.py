"""A trainer that is started by module path: a program of its own, watched by the job's trainer process.

    trainer process (Ray)                    program: python -m rlite.trainer.ppo --config FILE, or under torchrun
      ├─ starts ────────────────────────────>  │
      ├─ looks twice a second: dead, stopped?  │
      └─ reads the step and final errors <──── reporting.report_step, once per step

The end of the program, for any cause, is the end of the trainer's run. The master restarts the trainer process,
which starts the program again with the same options. The program then resumes from its newest checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import yaml

from rlite.control.health import Judge, NodeAgent
from rlite.control.spec import HealthOptions, JobPlan
from rlite.control.workers import TrainerOutcome, TrainerRun
from rlite.runtime.cluster.guard import Guard, find, reap
from rlite.runtime.cluster.host import WorkerContext
from rlite.services.recovery import reporting
from rlite.services.recovery.failover import WorkloadId

SUBMISSION = "RLITE_SUBMISSION"
"""environment variable with the id of the job's submission, in every process of the program"""
LOOK_S = 0.5
TAIL_LINES = 40
"""last lines of the program's output in the event log"""
NODE = "here"


@dataclass(frozen=True)
class Program:
    """Program of a job."""

    plan: JobPlan
    """plan of the job: `spec.trainer` is run as `python -m MODULE --config FILE`, and `spec.config` is the FILE"""
    ray_address: str
    has_begun: bool
    """an earlier start of the program has reported"""

    def __call__(self, context: WorkerContext) -> ProgramProcess:
        """Return the worker of the trainer's process."""
        return ProgramProcess(self)

    def command(self, file: Path) -> list[str]:
        """Return the command of the program, whose options are in a file."""
        spec = self.plan.spec
        program = ["-m", spec.trainer, "--config", str(file)]
        if spec.num_processes == 1:
            return [sys.executable, *program]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={spec.num_processes}"]
        return [sys.executable, *torchrun, *program]


class ProgramProcess(TrainerRun):
    """Worker of the trainer's process of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program, self._plan = program, program.plan
        self._is_interrupted = False
        self._process: subprocess.Popen[str] | None = None
        self._report: reporting.TrainerReport | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def _run(self) -> str:
        reap(self._plan.submission, SUBMISSION)  # what an earlier start left on this machine
        guard = Guard()
        try:
            with tempfile.TemporaryDirectory(prefix="rlite-program-") as folder:
                return self._run_in(Path(folder), guard)
        finally:
            guard.end()
            guard.close()

    def outcome(self, wait_s: float) -> TrainerOutcome:
        """Return the state of the program, at its end or after `wait_s` seconds."""
        self._ended.wait(wait_s)
        report = self._report
        is_final = self._progress == "raised" and report is not None and bool(report.final_error)
        trace = "\n".join(self._tail) if self._progress == "raised" else ""
        return TrainerOutcome(self._progress, True, self._error, trace, report, is_final)

    def interrupt(self) -> None:
        """Let the program save and end, as after SIGTERM without a control plane."""
        was_asked, self._is_interrupted = self._is_interrupted, True
        if self._process is not None and not was_asked:  # a second signal would end it at once
            self._process.terminate()

    def _run_in(self, folder: Path, guard: Guard) -> str:
        """Run the program.

        Args:
            folder: for the options and the report.
            guard: owner of the program's processes.

        Returns:
            Why the program failed; "" if it did not.
        """
        options, report_file = folder / "config.yaml", folder / "report.json"
        options.write_text(yaml.safe_dump(dict(self._plan.spec.config), sort_keys=False))
        process = self._process = subprocess.Popen(
            self._program.command(options),
            env=self._environment(report_file, guard),
            cwd=self._plan.folder if os.path.isdir(self._plan.folder) else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if self._is_interrupted:
            process.terminate()
        reader = threading.Thread(target=self._pass_on, args=(process,), name="rlite-program-output", daemon=True)
        reader.start()
        watch = ProgramWatch(self._plan.spec.health, process.pid)
        error = ""
        while process.poll() is None and not error:
            self._report = reporting.read(report_file) or self._report
            error = watch.look(self._report)
            try:
                process.wait(0.0 if error else LOOK_S)
            except subprocess.TimeoutExpired:
                continue
        guard.end()  # all that the program left, and a stopped or hung program itself
        process.wait()
        reader.join(LOOK_S)
        self._report = reporting.read(report_file) or self._report
        if self._report is not None and self._report.final_error:
            return self._report.final_error
        return error or _end_of(self._plan.spec.trainer, process.returncode)

    def _environment(self, report_file: Path, guard: Guard) -> dict[str, str]:
        plan, spec = self._plan, self._plan.spec
        paths = [path for path in (plan.folder, os.environ.get("PYTHONPATH")) if path]
        is_left = "OMP_NUM_THREADS" in plan.env() or spec.device_type == "GPU"
        threads = {} if is_left else {"OMP_NUM_THREADS": str(spec.device_per_node // spec.num_processes)}
        return {
            **os.environ,
            **threads,
            **guard.mark,
            **reporting.environment(report_file, self._program.has_begun),
            SUBMISSION: plan.submission,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "RAY_ADDRESS": self._program.ray_address,
        }

    def _pass_on(self, process: subprocess.Popen[str]) -> None:
        """Print the program's output, which Ray shows to the submitter, and keep the end of it."""
        assert process.stdout is not None
        for line in process.stdout:
            self._tail.append(line.rstrip())
            print(line, end="", flush=True)


class ProgramWatch:
    """Health of a program: its first process and the ranks that torchrun started."""

    def __init__(self, health: HealthOptions, pid: int) -> None:
        self._judge = Judge(health)
        self._late_after_s = health.late_step
        self._agent = NodeAgent()
        self._pid = pid
        self._first = WorkloadId("program", 0)
        self._looked_at = self._advanced_at = time.monotonic()
        self._is_late = False
        self._report: reporting.TrainerReport | None = None

    def look(self, report: reporting.TrainerReport | None) -> str:
        """Return the reason why the program counts as failed, or ""."""
        now = time.monotonic()
        seconds, self._looked_at = min(now - self._looked_at, 2 * LOOK_S), now
        if report != self._report:
            self._report, self._advanced_at = report, now
        self._watch_new()
        is_late = now - self._advanced_at > self._late_after_s
        if is_late != self._is_late:
            self._is_late = is_late
            self._judge.note_late(self._first, f"a step (limit {self._late_after_s:g} s)" if is_late else "")
        findings = self._judge.observe(NODE, self._agent.look(self._judge.pids().get(NODE, [])), seconds)
        return "; ".join(f"{finding.condition}: {finding.detail}" for finding in findings)

    def _watch_new(self) -> None:
        ranks = [process.pid for process in find("rank", self._pid)]
        for pid in {self._pid, *ranks} - set(self._judge.pids().get(NODE, ())):
            life = self._first if pid == self._pid else WorkloadId("rank", pid)
            self._judge.watch(life, NODE, pid)


def _end_of(module: str, status: int) -> str:
    """Return how a program failed, in words; "" if it did not."""
    if status == 0:
        return ""
    if status < 0:
        return f"{module} was killed by {signal.Signals(-status).name}"
    name = signal.Signals(status - 128).name if status in (130, 143) else ""
    return f"{module} was ended by {name}" if name else f"{module} ended with status {status}"
