"""Processes of a run by their role."""

from __future__ import annotations

from typing import Literal

import psutil

Role = Literal["driver", "agent", "rank", "worker", "control", "sandbox"]
"""driver: the program. agent: torchrun's. rank: a process of torchrun's. worker: a process of Ray's with our workers.
control: Ray's control service (GCS). sandbox: a process that runs rewards or environments."""


def find(role: Role, root: int) -> list[psutil.Process]:
    """Return the living processes of a role in the process tree of the run, in order of their ids.

    Args:
        role: the role to look for.
        root: process id of the run's first process.
    """
    try:
        first = psutil.Process(root)
        tree = [first, *first.children(recursive=True)]
    except psutil.Error:
        return []
    found = [process for process in tree if _has_role(process, role, first)]
    return sorted(found, key=lambda process: process.pid)


def _has_role(process: psutil.Process, role: Role, first: psutil.Process) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        command = process.cmdline()
        is_launched = "torch.distributed.run" in first.cmdline()
        is_child = process.ppid() == first.pid
        match role:
            case "agent":
                return is_launched and process == first
            case "rank":
                return is_launched and is_child and "RANK" in process.environ()
            case "driver":
                return process.environ().get("RANK") == "0" and is_child if is_launched else process == first
            case "worker":
                return process.name().startswith("ray::RayHost") or command[:1] == ["ray::RayHost"]
            case "control":
                return process.name().startswith("gcs_server")
            case "sandbox":
                # forked by its keeper, which has the same command line
                keeper = process.parent() if command[1:2] == ["-c"] else None
                return keeper is not None and keeper.cmdline() == command and "multiprocessing" not in "".join(command)
    except psutil.Error:  # it ended just now
        return False
