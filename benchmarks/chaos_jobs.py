"""Attacks on jobs of the control plane: racing submissions, damaged state, killed masters, programs of workloads.

    python -m benchmarks.chaos_jobs

Each attack meets a running job on one Ray of this machine. Printed is one line for each attack: its name, whether the
job ended as it has to, and the seconds to its end. The exit status is 1 unless all did. It takes about a minute.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray

import rlite
from rlite.control import BaseTrainer, BaseWorkload, JobHandle, RLJob, RLJobBuilder
from rlite.control.job import connect
from rlite.errors import ConfigError
from rlite.runtime.cluster.ray.fleet import Fleet, RayStore, Service, keep_plan

END_S = 60.0


class Actor(BaseWorkload):
    """It starts a program, which must end with it."""

    def work(self) -> int:
        """Start the program, once, and note both processes."""
        folder = Path(self.config.out)
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (folder / f"pid-{os.getpid()}").touch()
        (folder / f"pid-{child.pid}").touch()
        return child.pid


class Trainer(BaseTrainer):
    """It waits until the attack is over."""

    def init(self) -> None:
        """Let all actors work."""
        self.RG_ACTOR.work()

    def fit(self) -> None:
        """Note the start, and wait for the word to end."""
        out = Path(self.config.out)
        (out / "begun").touch()
        while not (out / "go").exists():
            time.sleep(0.05)


def job(out: Path) -> RLJob:
    """Return a job of two actors that works in a new folder."""
    out.mkdir()
    builder = RLJobBuilder().device_per_node(2).device_type("CPU").config({"out": str(out)}).trainer(Trainer)
    return builder.actor(Actor).total(2).per_node(2).end().options(backoff=0.1).build()


def submit(name: str, out: Path) -> JobHandle:
    """Submit a job, and wait until its trainer runs."""
    handle = job(out).submit(name, blocking=False)
    assert isinstance(handle, JobHandle)
    wait_for((out / "begun").exists)
    return handle


def wait_for(is_there: Callable[[], Any]) -> bool:
    """Wait until something is there, and return whether it came in time."""
    deadline = time.monotonic() + END_S
    while not is_there():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def kill_master(name: str) -> None:
    """Kill the process of a job's master with SIGKILL."""
    os.kill(ray.get(Service(name).actor.host_look.remote()).pid, signal.SIGKILL)


def is_clean(name: str, out: Path) -> bool:
    """Return whether neither a process of the job nor a program of its workloads is left."""
    pids = [int(path.name.removeprefix("pid-")) for path in out.glob("pid-*")]
    return wait_for(lambda: not Fleet(name).names() and not any(map(is_alive, pids)))


def is_alive(pid: int) -> bool:
    """Return whether a process runs."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def race(folder: Path) -> bool:
    """Submit two jobs of one name at once: one runs, by its own specification, and the other is refused."""
    handles: dict[Path, JobHandle] = {}

    def enter(out: Path) -> None:
        try:
            handles[out] = submit("race", out)
        except ConfigError:
            return

    threads = [threading.Thread(target=enter, args=(folder / name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ((out, handle),) = handles.items()
    (out / "go").touch()
    is_right = handle.result(END_S).succeeded and [path.parent for path in folder.glob("*/begun")] == [out]
    return is_right and is_clean("race", out)


def killed_master(folder: Path) -> bool:
    """Kill the master: its successor takes the job over."""
    handle = submit("killed", folder / "job")
    kill_master("killed")
    (folder / "job" / "go").touch()
    return handle.result(END_S).succeeded and is_clean("killed", folder / "job")


def overwritten_plan(folder: Path) -> bool:
    """Keep another plan for the name and kill the master: its successor goes on with its own."""
    handle = submit("plan", folder / "job")
    other = job(folder / "other").plan("plan", 0)
    keep_plan("plan", other.submission, other)
    kill_master("plan")
    (folder / "job" / "go").touch()
    is_right = handle.result(END_S).succeeded and not (folder / "other" / "begun").exists()
    return is_right and is_clean("plan", folder / "job")


def unreadable_state(folder: Path) -> bool:
    """Damage the stored state and kill the master: its successor ends the job and says why."""
    handle = submit("state", folder / "job")
    RayStore().save("state", "{")
    kill_master("state")
    return "cannot read its state" in handle.result(END_S).error and is_clean("state", folder / "job")


def lost_master(folder: Path) -> bool:
    """End the master for good: `stop` finds what it left."""
    handle = submit("lost", folder / "job")
    ray.kill(Service("lost").actor)
    wait_for(lambda: "master" not in Fleet("lost").names())
    handle.stop()
    return is_clean("lost", folder / "job")


def killed_workload(folder: Path) -> bool:
    """Kill the workloads: the programs that they started end, and the job starts again."""
    handle = submit("child", folder / "job")
    before = [int(path.name.removeprefix("pid-")) for path in (folder / "job").glob("pid-*")]
    for pid in before:
        if "sleep" not in psutil.Process(pid).cmdline():
            os.kill(pid, signal.SIGKILL)
    is_right = wait_for(lambda: not any(map(is_alive, before)))
    (folder / "job" / "go").touch()
    return is_right and handle.result(END_S).restarts == 1 and is_clean("child", folder / "job")


ATTACKS = (race, killed_master, overwritten_plan, unreadable_state, lost_master, killed_workload)


def main() -> None:
    """Make every attack, and print a line for each."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        connect(job(Path(folder, "job")).spec, None)
    for attack in ATTACKS:
        with tempfile.TemporaryDirectory(prefix="rlite-chaos-") as folder:
            began = time.monotonic()
            is_right = attack(Path(folder))
        failed += not is_right
        print(f"{attack.__name__:18} {'right' if is_right else 'WRONG'}  {time.monotonic() - began:5.1f} s", flush=True)
    rlite.shutdown()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
