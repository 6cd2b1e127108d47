"""Give up privileges before a process runs user code. This module imports only the standard library.

Environment variables pass by name, because other variables may hold secrets of the run. The kernel confines a process
in three ways, as far as it has them: by its capabilities, by Landlock (`landlock.py`) and by a filter of system calls
(`syscalls.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import struct
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from rlite.sandbox.landlock import restrict, version, writable_paths
from rlite.sandbox.syscalls import LIBC, refuse_calls

_PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|PYTHON\w*|VIRTUAL_ENV|CONDA_PREFIX|"
    r"(LD|DYLD)_(LIBRARY_PATH|PRELOAD)|SSL_CERT_(FILE|DIR)|"
    r"(?!OMP_(PROC_BIND|PLACES)|(GOMP_CPU|KMP)_AFFINITY)(OMP|MKL|KMP|GOMP|OPENBLAS|BLIS|NUMEXPR|VECLIB|ONEDNN)_\w+|"
    r"HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_CACHE|DATASETS_OFFLINE)|TOKENIZERS_PARALLELISM|SYSTEMROOT"
)
_DROP_FROM_BOUNDING_SET = 24
_KEPT_CAPABILITIES = {0, 1, 2, 3, 4, 5, 6, 7, 10, 18}
"""capabilities of root over files, users and ports: CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, KILL, SETGID,
SETUID, NET_BIND_SERVICE and SYS_CHROOT"""
MAX_PASSES = 1000
"""passes after which processes that fork while they are ended are given up"""


def passed_environment(environment: Mapping[str, str], further: Collection[str] = ()) -> dict[str, str]:
    """Return the environment variables that a process may have.

    Variables that bind threads to cores do not pass: they name the driver's cores, and a process may bind no thread.

    Args:
        environment: all variables. Variables that describe the machine and its numerics pass.
        further: names of further variables that pass.
    """
    return {name: value for name, value in environment.items() if name in further or _PASSED.fullmatch(name)}


def confine(driver: int) -> str:
    """Prepare this process for user code.

    The process ends before its parent if memory runs out, ends with its parent, and cannot touch other processes.

    Args:
        driver: process id of the program that asks for the calls.

    Returns:
        The protections that the kernel lacks, in words; empty if it has all.
    """
    with contextlib.suppress(OSError):  # when memory runs out, Linux shall end this process, not its driver
        Path("/proc/self/oom_score_adj").write_text("1000")
    if sys.platform != "linux":
        return ""
    _give_up_capabilities()
    follow_parent(signal.SIGKILL)  # a hung function cannot see its driver go
    keeper = os.getppid()
    groups = (-os.getpgid(pid) for pid in (driver, keeper))
    is_scoped = restrict(writable_paths())
    is_filtered = refuse_calls(os.getpid(), () if is_scoped else (-1, driver, keeper, *groups))
    return " and ".join(name for name, has in (("Landlock", version()), ("seccomp", is_filtered)) if not has)


def _give_up_capabilities() -> None:
    """Drop the capabilities by which root can reach other processes and the machine."""
    header, sets = struct.pack("<Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    if LIBC.capget(header, sets) != 0:
        return
    words = [*struct.unpack("<6I", sets.raw)]  # effective, permitted and inheritable ones, twice 32 bits
    for capability in set(range(64)) - _KEPT_CAPABILITIES:
        LIBC.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
        for kind in range(3):
            words[capability // 32 * 3 + kind] &= ~(1 << capability % 32)
    LIBC.capset(header, struct.pack("<6I", *words))


def part() -> None:
    """Separate this process from its parent, a sandbox process: it ends with the parent and cannot touch it."""
    if sys.platform == "linux":
        follow_parent(signal.SIGKILL)
        restrict()


def follow_parent(death_signal: int) -> None:
    """Receive a signal when the parent ends, and adopt orphaned descendants. This needs Linux."""
    set_death_signal, become_subreaper = 1, 36
    LIBC.prctl(set_death_signal, death_signal, 0, 0, 0)
    LIBC.prctl(become_subreaper, 1, 0, 0, 0)  # orphans of its children stay below it, where they are found


def silence() -> None:
    """Discard standard output and standard error. The terminal and the log belong to the driver."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def children(pid: int) -> set[int]:
    """Return the processes that a process started or adopted; an empty set if the system does not list them."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as listed:
                found.update(map(int, listed.read().split()))
    return found


def number_in(path: str, name: str) -> int:
    """Return the number behind a name in a file of the kernel; 0 if the system has no such file or name."""
    with contextlib.suppress(OSError):  # a process may name itself by bytes that are no text
        found = re.search(rf"^{name}:?\s+(\d+)", Path(path).read_text(errors="replace"), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def descendants(pid: int) -> list[int]:
    """Return the children of a process and their descendants."""
    found = [*children(pid)]
    for child in found:
        found += children(child)
    return found


def end_descendants(kept: Callable[[], Collection[int]] = tuple) -> bool:
    """Kill all processes that this process started, except the kept children and their descendants.

    Processes that fork while they are killed are found in a later pass, as orphans.

    Args:
        kept: returns the process ids of the children to keep.

    Returns:
        Whether all other processes have ended.
    """
    was_empty = False
    for _ in range(MAX_PASSES):
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # there is none
            return True
        spared = set(kept())
        found = [pid for child in children(os.getpid()) - spared for pid in (child, *descendants(child))]
        if not found and was_empty:
            return True
        was_empty = not found  # Linux may leave a child out while others end
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(OSError):
                os.waitpid(pid, 0)
    return False
