"""Refuse system calls that act on other processes. This module imports only the standard library.

A seccomp filter sees the numbers of a system call, and no memory. It therefore refuses a call on any process other than
the caller, also on processes that the caller started. The filter lasts for all descendants. It answers with an error
and kills nothing, so programs that only try a call go on.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Collection, Mapping

LIBC = ctypes.CDLL(None, use_errno=True)
GIVE_UP_PRIVILEGES = 38
"""operation of prctl, the condition of seccomp and of Landlock: no program that is started gains privileges"""
_SET_FILTER, _WITHOUT_SLOWER_SPECULATION = 1, 1 << 2
_CLONE_PARENT = 0x8000
_FOREIGN_TABLE = 0x40000000
"""numbers of x86-64 from which on the calls are those of x32"""
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""number of the architecture, and place of its system calls' numbers in the tables below"""
_OWN_ONLY = ((302, 261), (142, 118), (144, 119), (203, 122), (314, 274), (256, 238), (279, 239))
"""prlimit64, sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr, migrate_pages and move_pages: calls
whose first argument is a process"""
_OWN_PRIORITY = ((141, 140, 0), (251, 30, 1))
"""setpriority and ioprio_set: calls whose arguments are a kind of target and a target; with the kind of a process"""
_REFUSED = ((312, 272), (310, 270), (311, 271), (440, 440), (448, 448), (438, 438), (298, 241))
"""kcmp, process_vm_readv, process_vm_writev, process_madvise, process_mrelease, pidfd_getfd and perf_event_open"""
_SIGNALS = ((62, 129), (200, 130), (234, 131), (129, 138), (297, 240))
"""kill, tkill, tgkill, rt_sigqueueinfo and rt_tgsigqueueinfo"""
_SIGNAL_BY_DESCRIPTOR = (424, 424)
_OWNERS = (((72, 25), (8, 15)), ((16, 29), (0x8901, 0x8902)))
"""fcntl and ioctl, with the operations that choose who receives the signals of a file"""
_PTRACE, _ATTACH, _SEIZE = (101, 117), 16, 0x4206
_CLONE, _CLONE3, _SECCOMP = (56, 220), (435, 435), (317, 277)

Instruction = tuple[int, int, int, int]
"""operation, instructions to skip if it holds, and if it does not, operand"""
_LOAD, _IS_EQUAL, _IS_AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""places in the kernel's description of a call"""


def refuse_calls(own: int, protected: Collection[int] = ()) -> bool:
    """Refuse system calls on other processes in this process, and in all processes that it starts from now on.

    Args:
        own: process id of this process.
        protected: process ids, negative for process groups, that must receive no signal.

    Returns:
        Whether the kernel applies the filter. It may have no seccomp; on other architectures there is no filter.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES or struct.calcsize("P") != 8:
        return False
    code = b"".join(struct.pack("=HBBI", *step) for step in filter_program(machine, own, protected))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    LIBC.prctl(GIVE_UP_PRIVILEGES, 1, 0, 0, 0)
    call = _SECCOMP[_ARCHITECTURES[machine][1]]
    flags = (_WITHOUT_SLOWER_SPECULATION, 0)  # the flag is unknown before Linux 4.17
    return any(LIBC.syscall(call, _SET_FILTER, flag, program) == 0 for flag in flags)


def filter_program(machine: str, own: int, protected: Collection[int] = ()) -> list[Instruction]:
    """Return the filter's instructions. Calls of another architecture, or of x32, do not exist for the process.

    Args:
        machine: `x86_64` or `aarch64`.
        own: process id of the process.
        protected: process ids, negative for process groups, that must receive no signal.
    """
    architecture, place = _ARCHITECTURES[machine]
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_IS_EQUAL, 1, 0, architecture), *_fail(errno.ENOSYS)]
    program += [(_LOAD, 0, 0, _NUMBER), (_IS_AT_LEAST, 0, 1, _FOREIGN_TABLE), *_fail(errno.ENOSYS)]
    for number, rule in _rules(place, own, protected).items():
        program += [(_IS_EQUAL, 0, len(rule) + 1, number), *rule, (_RETURN, 0, 0, _ALLOW)]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _rules(place: int, own: int, protected: Collection[int]) -> Mapping[int, list[Instruction]]:
    """Return the instructions for each system call that is not always allowed, by its number."""
    rules = {numbers[place]: _only(0, 0, own) for numbers in _OWN_ONLY}
    rules |= {numbers[place]: _only(0, numbers[2]) + _only(1, 0, own) for numbers in _OWN_PRIORITY}
    rules |= {numbers[place]: _fail(errno.EPERM) for numbers in _REFUSED}
    rules[_PTRACE[place]] = _never(0, _ATTACH, _SEIZE)
    rules[_CLONE[place]] = [_load(0), (_HAS_BIT, 0, 1, _CLONE_PARENT), *_fail(errno.EPERM)]
    rules[_CLONE3[place]] = _fail(errno.ENOSYS)  # its flags are in memory; programs fall back to clone
    if protected:
        rules |= {numbers[place]: _never(0, *protected) for numbers in _SIGNALS}
        rules |= {numbers[place]: _never(1, *operations) for numbers, operations in _OWNERS}
        rules[_SIGNAL_BY_DESCRIPTOR[place]] = _fail(errno.EPERM)
    return rules


def _load(argument: int) -> Instruction:
    return _LOAD, 0, 0, _ARGUMENTS + 8 * argument  # the low half: process ids have 32 bits


def _fail(error: int) -> list[Instruction]:
    return [(_RETURN, 0, 0, _FAIL | error)]


def _only(argument: int, *values: int) -> list[Instruction]:
    """Return instructions that refuse a call unless its argument has one of some values."""
    checks = [(_IS_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [_load(argument), *checks, *_fail(errno.EPERM)]


def _never(argument: int, *values: int) -> list[Instruction]:
    """Return instructions that refuse a call if its argument has one of some values."""
    checks = [step for value in values for step in ((_IS_EQUAL, 0, 1, value & 0xFFFFFFFF), *_fail(errno.EPERM))]
    return [_load(argument), *checks]
