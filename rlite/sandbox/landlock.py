"""Confine a process by Landlock, Linux 5.13 and later. This module imports only the standard library.

A process that is confined can read and trace only processes that it started (Linux 5.13), and signal no others (6.12),
even under the same user. File rules add that it cannot write to files such as /proc/PID/oom_score_adj.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
import sys
from collections.abc import Sequence

from rlite.sandbox.syscalls import GIVE_UP_PRIVILEGES, LIBC

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_WRITE_FILE, _MAKE_BLOCK_DEVICES, _MOVE_BETWEEN_FOLDERS = 1 << 1, 1 << 11, 1 << 13
_SCOPE_SIGNALS = 1 << 1
_BENEATH_PATH = 1
_KERNEL_FOLDERS = ("proc", "sys")
_OWN_FILE = "/proc/self/clear_refs"
"""the process resets its measured peak of memory by this file"""


def version() -> int:
    """Return the version of Landlock that the kernel has; 0 if it has none. Version 6 has rules for signals."""
    return max(LIBC.syscall(_CREATE, None, ctypes.c_size_t(0), 1), 0) if sys.platform == "linux" else 0


def writable_paths() -> list[str]:
    """Return the paths below which a confined process may write: all of / but the kernel's own folders.

    The list is empty if / cannot be listed. Then there are no rules for files.

    A descriptor stays open on the file of this process that is in them. Otherwise the kernel could forget the file, and
    with it the rule that allows it.
    """
    with contextlib.suppress(OSError):  # some sandboxes have no such file
        os.open(_OWN_FILE, os.O_PATH | os.O_CLOEXEC)
    try:
        entries = [entry for entry in os.scandir("/") if entry.name not in _KERNEL_FOLDERS and not entry.is_symlink()]
    except OSError:
        return []
    return [*(entry.path for entry in entries), _OWN_FILE]


def restrict(writable: Sequence[str] = ()) -> bool:
    """Let this process read, trace and signal only processes that it starts.

    Args:
        writable: paths below which it may open files for writing; empty: wherever it may now.

    Returns:
        Whether the kernel refuses this process's signals to all other processes.
    """
    abi = version()
    if abi < 1:
        return False
    # every set of rules refuses to move files between folders, unless one allows it, which the first version cannot;
    # there a set must have some rule for files: this one needs root anyway
    handled = _MOVE_BETWEEN_FOLDERS if abi >= 2 else _MAKE_BLOCK_DEVICES
    handled |= _WRITE_FILE if writable else 0
    rules = struct.pack("<QQQ", handled, 0, _SCOPE_SIGNALS) if abi >= 6 else struct.pack("<Q", handled)
    descriptor = LIBC.syscall(_CREATE, rules, ctypes.c_size_t(len(rules)), 0)
    if descriptor < 0:
        return False
    for path in writable or ("/",):
        _allow(descriptor, path, handled & ~_MAKE_BLOCK_DEVICES)
    LIBC.prctl(GIVE_UP_PRIVILEGES, 1, 0, 0, 0)
    is_restricted = LIBC.syscall(_RESTRICT, descriptor, 0) == 0
    os.close(descriptor)
    return is_restricted and abi >= 6


def _allow(rules: int, path: str, access: int) -> None:
    """Allow access to a file, or to everything below a folder. A path that is gone needs no rule."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            access &= _WRITE_FILE
        rule = struct.pack("<Qi", access, descriptor)
        LIBC.syscall(_ADD_RULE, rules, _BENEATH_PATH, rule, 0)
        os.close(descriptor)
