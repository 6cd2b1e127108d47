"""Privileges that a process gives up before it runs user code. This module imports the standard library alone.

Environment variables pass by name, because others may hold secrets of the run. If Linux has Landlock (5.13; signals:
6.12), a process can read, trace and signal only processes that it has started, also under the same user.
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

_PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|PYTHON\w*|VIRTUAL_ENV|CONDA_PREFIX|"
    r"(LD|DYLD)_(LIBRARY_PATH|PRELOAD)|SSL_CERT_(FILE|DIR)|(OMP|MKL|KMP|GOMP|OPENBLAS|BLIS|NUMEXPR|VECLIB|ONEDNN)_\w+|"
    r"HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_CACHE|DATASETS_OFFLINE)|TOKENIZERS_PARALLELISM|SYSTEMROOT"
)
_LIBC = ctypes.CDLL(None, use_errno=True)
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446
_GIVE_UP_PRIVILEGES, _DROP_FROM_BOUNDING_SET = 38, 24
_CAP_SYS_ADMIN, _CAP_PERFMON = 21, 38
_MAKE_BLOCK_DEVICES, _SCOPE_SIGNALS = 1 << 11, 1 << 1
MAX_PASSES = 1000
"""passes after which processes that fork while they are ended are given up"""


def passed_environment(environment: Mapping[str, str], further: Collection[str] = ()) -> dict[str, str]:
    """Return the variables that a process may have: variables of its machine and its numerics, and `further` ones."""
    return {name: value for name, value in environment.items() if name in further or _PASSED.fullmatch(name)}


def confine() -> None:
    """Prepare this process for user code: it ends before its parent and with it, and leaves others alone."""
    with contextlib.suppress(OSError):  # when memory runs out, Linux shall end this process, not its driver
        Path("/proc/self/oom_score_adj").write_text("1000")
    if sys.platform == "linux":
        _give_up_capabilities()
    part()


def _give_up_capabilities() -> None:
    """Give up what lets root look into other processes past Landlock (since Linux 6.16)."""
    header, sets = struct.pack("<Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    if _LIBC.capget(header, sets) != 0:
        return
    words = [*struct.unpack("<6I", sets.raw)]  # effective, permitted and inheritable ones, twice 32 bits
    for capability in (_CAP_SYS_ADMIN, _CAP_PERFMON):
        _LIBC.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
        for kind in range(3):
            words[capability // 32 * 3 + kind] &= ~(1 << capability % 32)
    _LIBC.capset(header, struct.pack("<6I", *words))


def part() -> None:
    """Part this process from the one that has started it: it ends with it, and cannot touch it."""
    if sys.platform != "linux":
        return
    set_death_signal, become_subreaper = 1, 36
    _LIBC.prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)  # a hung function cannot see its driver go
    _LIBC.prctl(become_subreaper, 1, 0, 0, 0)  # orphans of its children stay below it, where they are found
    restrict()


def restrict() -> None:
    """Let this process read, trace and signal only processes that it starts itself, on Linux with Landlock."""
    if sys.platform != "linux":
        return
    abi = _LIBC.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return
    # a set of rules must have one; older kernels know none but those for files: this one needs root anyway
    rules = struct.pack("<QQQ", 0, 0, _SCOPE_SIGNALS) if abi >= 6 else struct.pack("<Q", _MAKE_BLOCK_DEVICES)
    descriptor = _LIBC.syscall(_LANDLOCK_CREATE, rules, ctypes.c_size_t(len(rules)), 0)
    if descriptor >= 0:
        _LIBC.prctl(_GIVE_UP_PRIVILEGES, 1, 0, 0, 0)  # Landlock's condition
        _LIBC.syscall(_LANDLOCK_RESTRICT, descriptor, 0)
        os.close(descriptor)


def silence() -> None:
    """Discard standard output and error: the terminal and the log are the driver's."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def children(pid: int) -> set[int]:
    """Return the processes that a process has started or adopted; none if the system does not list them."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as listed:
                found.update(map(int, listed.read().split()))
    return found


def descendants(pid: int) -> list[int]:
    """Return a process's children, and their descendants."""
    found = [*children(pid)]
    for child in found:
        found += children(child)
    return found


def end_descendants(kept: Callable[[], Collection[int]] = tuple) -> bool:
    """End all processes that this one has started, but the children `kept` and their descendants.

    Processes that fork while they are ended are met again, as orphans. Returns whether all are ended.
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
