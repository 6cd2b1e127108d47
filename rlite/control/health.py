"""Health of processes: distinguish dead, stopped and hung processes.

Ray reports a dead process. A `NodeAgent` on each node reports process states and CPU times; its answers are the node's
heartbeat. `Judge` turns these reports into findings. It is pure: the time is an argument.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlite.control.spec import HealthOptions
from rlite.runtime.cluster.host import Outcome
from rlite.services.recovery.failover import Condition, WorkloadId

WATCH_S = 0.5
"""seconds between two checks of the master"""
TICK_S = 1.0
"""seconds between two rounds of the master"""
LIVE_SHARE = 0.03
"""share of a core above which a process counts as computing; Ray's own threads take less"""
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
AT_WORK = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)


@dataclass(frozen=True)
class Vital:
    """State of a process."""

    status: str
    """psutil's word, and "running" if any thread waits for a core"""
    cpu_s: float
    """CPU seconds of the process and its children so far"""


class NodeAgent:
    """Observer of the processes on its node, and of the master if the master is on the node.

    Ray restarts a master that was killed. A master that is stopped is killed by the agent of its node.
    """

    def __init__(self, stopped_after_s: float = 3.0) -> None:
        """Observe nothing yet.

        `stopped_after_s`: seconds in process state T after which a stopped master is killed.
        """
        self._stopped_after_s = stopped_after_s
        self._master = 0

    def look(self, pids: Iterable[int], master: int = 0) -> dict[int, Vital]:
        """Return the state of each process that exists."""
        if master and master != self._master:
            self._master = master
            threading.Thread(target=self._watch_master, args=(master,), name="rlite-master-watch", daemon=True).start()
        children, found = _children(), {}
        for pid in pids:
            with suppress(psutil.Error):  # it has ended
                process = psutil.Process(pid)
                found[pid] = Vital(_status(process), sum(map(_cpu_s, _tree(process, children))))
        return found

    def _watch_master(self, pid: int) -> None:
        stopped_s = 0.0
        while stopped_s < self._stopped_after_s:
            time.sleep(WATCH_S)
            try:
                is_stopped = psutil.Process(pid).status() in STOPPED
            except psutil.Error:  # it has ended
                return
            stopped_s = stopped_s + WATCH_S if is_stopped else 0.0
        self.kill([pid])

    def kill(self, pids: Iterable[int]) -> None:
        """Kill processes that Ray cannot end, because they are stopped."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _status(process: psutil.Process) -> str:
    """Return the state of a process. psutil returns the state of the main thread, and calls run in others."""
    status = process.status()
    if status == psutil.STATUS_SLEEPING and any(map(_is_runnable, Path(f"/proc/{process.pid}/task").glob("*/stat"))):
        return psutil.STATUS_RUNNING
    return status


def _is_runnable(stat: Path) -> bool:
    with suppress(OSError):  # the thread has ended
        return stat.read_text(encoding="utf-8").rpartition(") ")[2].startswith("R")
    return False


def _children() -> dict[int, list[psutil.Process]]:
    """Return the children of all processes: one pass, however many processes are looked at."""
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended
            children.setdefault(process.ppid(), []).append(process)
    return children


def _tree(root: psutil.Process, children: Mapping[int, Sequence[psutil.Process]]) -> list[psutil.Process]:
    """Return a process and its descendants."""
    left, tree = dict(children), [root]
    for process in tree:  # which grows meanwhile
        tree += left.pop(process.pid, ())
    return tree


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        times = process.cpu_times()
        return times.user + times.system
    return 0.0


@dataclass(frozen=True)
class Finding:
    """Processes that have failed for one cause."""

    lives: tuple[WorkloadId, ...]
    pids: tuple[int, ...]
    condition: Condition
    detail: str


@dataclass
class Watched:
    """A process under observation."""

    life: WorkloadId
    pid: int
    stopped_s: float = 0.0
    late: str = ""
    """the call whose declared time has passed"""
    idle_s: float = 0.0
    """seconds since the process was last seen computing, while it is late"""
    cpu_s: float = 0.0


class Judge:
    """Judge of reports, which finds a process once. A node counts as silent only after its first report."""

    def __init__(self, limits: HealthOptions) -> None:
        self._limits = limits
        self._nodes: dict[str, dict[WorkloadId, Watched]] = {}
        self._silent_s: dict[str, float] = {}
        """seconds of silence, by node that has reported"""

    def watch(self, life: WorkloadId, node: str, pid: int) -> None:
        """Observe a process from now on."""
        self._nodes.setdefault(node, {})[life] = Watched(life, pid)

    def forget(self, is_gone: Callable[[WorkloadId], bool]) -> None:
        """Stop observing some workloads."""
        for node, here in self._nodes.items():
            self._nodes[node] = {life: each for life, each in here.items() if not is_gone(life)}

    def late(self) -> list[WorkloadId]:
        """Return the workloads that have a late call."""
        return [life for here in self._nodes.values() for life, each in here.items() if each.late]

    def note_late(self, life: WorkloadId, call: str) -> None:
        """Expect progress from a workload whose call is late; an empty call means that it answered."""
        for here in self._nodes.values():
            if life in here:
                here[life].late, here[life].idle_s = call, 0.0

    def pids(self) -> dict[str, list[int]]:
        """Return the processes to look at, by node."""
        return {node: [each.pid for each in here.values()] for node, here in self._nodes.items() if here}

    def restart(self, node: str) -> None:
        """Expect no report from a node whose agent is being restarted."""
        self._silent_s.pop(node, None)

    def observe(self, node: str, vitals: Mapping[int, Vital] | None, seconds: float) -> list[Finding]:
        """Take in a report of a node.

        `vitals`: state of its processes; None: the node has not answered. Returns the failed processes. They are no
        longer observed.
        """
        here, findings = list(self._nodes.get(node, {}).values()), list[Finding]()
        if vitals is not None:
            self._silent_s[node] = 0.0
            seen = [(each, vitals[each.pid]) for each in here if each.pid in vitals]
            findings = [found for each, vital in seen if (found := self._judge(each, vital, seconds)) is not None]
        elif node in self._silent_s:
            self._silent_s[node] += seconds
            if here and self._silent_s[node] >= self._limits.silent_after:
                lives, pids = tuple(each.life for each in here), tuple(each.pid for each in here)
                findings = [Finding(lives, pids, "stopped", f"no heartbeat for {self._silent_s[node]:.1f} s")]
        for life in (life for finding in findings for life in finding.lives):
            del self._nodes[node][life]
        return findings

    def _judge(self, each: Watched, vital: Vital, seconds: float) -> Finding | None:
        each.stopped_s = each.stopped_s + seconds if vital.status in STOPPED else 0.0
        used_s, each.cpu_s = vital.cpu_s - each.cpu_s, vital.cpu_s
        is_at_work = vital.status in AT_WORK or used_s > LIVE_SHARE * seconds
        each.idle_s = 0.0 if is_at_work or not each.late else each.idle_s + seconds
        if each.stopped_s >= self._limits.stopped_after:
            detail = f"process {each.pid} is in state T (SIGSTOP)"
            return Finding((each.life,), (each.pid,), "stopped", detail)
        if each.late and each.idle_s >= self._limits.hung_after:
            detail = f"{each.late} is late, and process {each.pid} has not computed for {each.idle_s:.0f} s"
            return Finding((each.life,), (each.pid,), "hung", detail)
        return None


class Rounds:
    """Rounds of questions to the agents of all nodes."""

    def __init__(self, judge: Judge, ask: Callable[[str, Sequence[int]], Future[Outcome]]) -> None:
        self._judge, self._ask = judge, ask
        self._began = time.monotonic()
        self._asked: dict[str, Future[Outcome]] = {}

    @property
    def seconds_left(self) -> float:
        """Seconds until the next round is due."""
        return max(self._began + TICK_S - time.monotonic(), 0.0)

    def findings(self, here: str) -> list[tuple[str, Finding, bool]]:
        """Return what the answers tell, and ask again.

        Returns node, finding, and whether the node is silent.
        """
        now = time.monotonic()
        seconds, self._began = min(now - self._began, 2 * TICK_S), now
        pids, found = {here: [], **self._judge.pids()}, []
        for node in pids:
            asked = self._asked.get(node)
            if asked is not None and asked.done() and asked.exception() is not None:
                self._judge.restart(node)  # Ray restarts an agent that died; it reports the death of a node itself
            elif asked is not None:
                vitals = asked.result().value if asked.done() else None
                found += [(node, finding, vitals is None) for finding in self._judge.observe(node, vitals, seconds)]
            if asked is None or asked.done():
                self._asked[node] = self._ask(node, pids[node])
        self._asked = {node: asked for node, asked in self._asked.items() if node in pids}
        return found

    def forget(self, node: str) -> None:
        """Expect no answer to the last question, because the node gets another agent."""
        self._asked.pop(node, None)
        self._judge.restart(node)
