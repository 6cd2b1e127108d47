"""A sandbox process cannot reach the program that started it, and ordinary work goes on."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from rlite.runtime.sandbox import child
from rlite.runtime.sandbox.calls import Call, Code, SandboxError
from rlite.runtime.sandbox.confine import Instruction, filter_program, passed_environment, version
from rlite.runtime.sandbox.pool import SandboxPool
from tests import hostile_rewards as hostile

ROOT = Path(__file__).resolve().parents[3]
X86, ARM = "x86_64", "aarch64"
NUMBER_OF_X86, NUMBER_OF_ARM = 0xC000003E, 0xC00000B7

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="confined by Linux")
needs_file_rules = pytest.mark.skipif(version() < 1, reason="needs Landlock, Linux 5.13")


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    cloudpickle.register_pickle_by_value(hostile)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    pool = SandboxPool(1)
    yield pool
    pool.close()
    cloudpickle.unregister_pickle_by_value(hostile)
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def run(pool: SandboxPool, function: Callable[..., Any], limit: int | None = None, **arguments: Any) -> Any:
    call = Call(Code.of(function), cloudpickle.dumps(arguments), 60, limit)
    return pool.submit(call).result(60)


def state_of_this_process() -> list[Any]:
    limits = [resource.getrlimit(kind) for kind in (resource.RLIMIT_CPU, resource.RLIMIT_FSIZE)]
    files = [Path(f"/proc/self/{name}").read_text() for name in ("oom_score_adj", "autogroup", "coredump_filter")]
    io_priority = ctypes.CDLL(None).syscall(252 if os.uname().machine == X86 else 31, 1, 0)
    return [limits, files, io_priority, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)]


@needs_file_rules
@pytest.mark.parametrize("origin", ["own code", "made code", "a program"])
def test_no_attack_reaches_the_program_that_started_the_process(pool: SandboxPool, origin: str) -> None:
    before = state_of_this_process()
    assert run(pool, hostile.reach, target=os.getpid(), origin=origin) == []
    assert state_of_this_process() == before


def test_a_process_with_the_same_rights_would_reach_it() -> None:
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        reached = set(hostile.reach(victim.pid, "a program"))
        assert reached >= {"limits", "priority", "affinity", "scheduler", "I/O priority", "memory score", "signal"}
        assert reached >= {"comparison", "reading memory", "descriptor", "parent", "signal by descriptor", "name"}
    finally:
        victim.kill()
        victim.communicate()


def ordinary_work(folder: str) -> list[str]:
    import asyncio
    import multiprocessing
    import resource
    import threading

    done, path = [], Path(folder)
    threads = [threading.Thread(target=done.append, args=("thread",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for start in ("fork", "spawn"):
        child = multiprocessing.get_context(start).Process(target=print)
        child.start()
        child.join()
        done.append(f"{start} {child.exitcode}")
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    program.kill()
    done.append(f"killed {program.wait()}")
    group = subprocess.Popen(["sh", "-c", "sleep 60"], start_new_session=True)
    os.killpg(group.pid, 9)
    done.append(f"killed {group.wait()}")

    async def echo() -> bytes:
        shell = await asyncio.create_subprocess_exec("echo", "hello", stdout=subprocess.PIPE)
        return (await shell.communicate())[0]

    done.append(asyncio.run(echo()).decode().strip())
    os.nice(1)
    for own in (0, os.getpid()):
        os.sched_setaffinity(own, os.sched_getaffinity(0))
        resource.prlimit(own, resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    (path / "a").mkdir()
    (path / "a" / "file").write_text("text")
    os.rename(path / "a" / "file", path / "file")
    os.link(path / "file", path / "a" / "link")
    for sink in ("/dev/null", "/dev/shm/rlite-test"):
        Path(sink).write_text("text")
    os.remove("/dev/shm/rlite-test")
    memory = os.memfd_create("memory")
    Path(f"/proc/self/fd/{memory}").write_text("text")
    return [*done, (path / "a" / "link").read_text()]


def test_ordinary_work_of_a_process_goes_on(pool: SandboxPool, tmp_path: Path) -> None:
    done = ["thread"] * 3 + ["fork 0", "spawn 0", "killed -9", "killed -9", "hello", "text"]
    assert run(pool, ordinary_work, folder=str(tmp_path)) == done


class Unrestricting:
    """Arguments that make `restrict` fail in the process that unpickles them."""

    def __reduce__(self) -> Any:
        return setattr, (child, "restrict", lambda: 1 / 0)


def test_a_fork_that_could_not_be_restricted_does_no_work(pool: SandboxPool, tmp_path: Path) -> None:
    def work(made: str, file: str, **others: Any) -> None:
        exec(made)
        Path(file).touch()

    code = Code.of(work)
    code.num_forks = 1
    arguments = {"made": "", "file": str(tmp_path / "file"), "others": Unrestricting()}
    with pytest.raises(SandboxError, match="ended"):
        pool.submit(Call(code, cloudpickle.dumps(arguments), 60)).result(60)
    assert not (tmp_path / "file").exists()


@needs_file_rules
def test_a_file_of_the_kernel_is_read_and_not_written(pool: SandboxPool) -> None:
    def work(path: str) -> list[Any]:
        text = Path(path).read_text()
        try:
            Path(path).write_text("0")
        except PermissionError as error:
            return [text.strip(), error.errno]
        return [text.strip(), 0]

    assert run(pool, work, path="/proc/self/oom_score_adj") == ["1000", errno.EACCES]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root has capabilities")
def test_root_keeps_only_its_rights_over_files_users_and_ports(pool: SandboxPool) -> None:
    def capabilities(through_a_program: bool) -> list[int]:
        text = Path("/proc/self/status").read_text()
        if through_a_program:
            text = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
        return [int(line.split()[1], 16) for line in text.splitlines() if line.startswith("Cap")]

    kept = 0b100_0000_0100_1111_1111
    for through_a_program in (False, True):
        assert not any(found & ~kept for found in run(pool, capabilities, through_a_program=through_a_program))


def take_memory(size: int, is_mapped: bool, is_copied: bool) -> float:
    import mmap
    import time

    memory = os.memfd_create("memory")
    os.ftruncate(memory, size)
    part = bytes(1 << 20)
    if is_mapped:
        mapped = mmap.mmap(memory, size)
    for start in range(0, size, len(part)):
        if is_mapped:
            mapped[start : start + len(part)] = part
        else:
            os.pwrite(memory, part, start)
    copies = [os.dup(memory) for _ in range(8)] if is_copied else []
    time.sleep(0.5)
    for descriptor in (memory, *copies):
        os.close(descriptor)
    return float(len(copies))


def test_memory_of_anonymous_files_counts_once(pool: SandboxPool) -> None:
    small, limit = 100 << 20, 220 << 20
    assert run(pool, take_memory, limit, size=small, is_mapped=True, is_copied=True) == 8.0
    assert run(pool, take_memory, limit, size=small, is_mapped=False, is_copied=True) == 8.0
    with pytest.raises(SandboxError, match="ran out of memory of at most"):
        run(pool, take_memory, limit, size=3 * small, is_mapped=False, is_copied=False)


def test_a_process_with_a_memory_limit_cannot_hide_memory_behind_open_files(pool: SandboxPool) -> None:
    def open_files() -> float:
        import resource

        return float(resource.getrlimit(resource.RLIMIT_NOFILE)[1])

    assert run(pool, open_files, 1 << 30) <= 4096


def test_a_process_that_names_itself_by_bytes_ends_no_other_call(pool: SandboxPool) -> None:
    def rename() -> str:
        ctypes.CDLL(None).prctl(15, b"\xff\xfe", 0, 0, 0)
        with open(os.memfd_create("held"), "wb") as file:
            file.write(bytes(1 << 20))
            time.sleep(0.2)  # the driver looks at the memory meanwhile
        return "done"

    for _ in range(2):
        assert run(pool, rename, 1 << 30) == "done"


def test_variables_that_bind_threads_to_cores_do_not_pass() -> None:
    bound = ["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"]
    free = ["OMP_NUM_THREADS", "KMP_BLOCKTIME", "MKL_NUM_THREADS", "GOMP_SPINCOUNT"]
    assert [*passed_environment(dict.fromkeys([*bound, *free], "1"))] == free


FILTER_ALONE = """
import fcntl, os, subprocess, sys, termios
from rlite.runtime.sandbox.confine import refuse_calls
parent = os.getppid()
found = [refuse_calls(os.getpid(), (-1, parent, -parent))]
for target in (parent, -parent, -1):
    try:
        os.kill(target, 0)
        found.append("sent")
    except PermissionError:
        found.append("refused")
end, other = os.pipe()
for by_file in (lambda: fcntl.fcntl(end, fcntl.F_SETOWN, parent), lambda: fcntl.ioctl(end, 0x8901, bytes(4))):
    try:
        by_file()
        found.append("owned")
    except PermissionError:
        found.append("refused")
fcntl.ioctl(end, termios.FIONREAD, bytes(4)), fcntl.fcntl(end, fcntl.F_GETOWN)
child = subprocess.Popen(["sleep", "60"])
child.kill()
found.append(child.wait())
print(*found)
"""
SMALL_VERSION = """
import os, sys
from rlite.runtime.sandbox import confine
known = confine.version()
confine.version = lambda: min(int(sys.argv[1]), known)
folder = sys.argv[2]
open(folder + "/file", "w").close()
found = [confine.restrict(confine.writable_paths()), confine.restrict()]
os.mkdir(folder + "/a")
try:
    os.rename(folder + "/file", folder + "/a/file")
    found.append("moved")
except OSError:
    found.append("kept")
for path in (folder + "/new", f"/proc/{os.getppid()}/oom_score_adj"):
    try:
        open(path, "w").close()
        found.append("written")
    except PermissionError:
        found.append("refused")
print(*found)
"""


WITHOUT = """
import os
from rlite.runtime.sandbox import confine
confine.version = lambda: 0
confine.os.uname = lambda: os.uname_result(("Linux", "", "", "", "riscv64"))
print(confine.confine(os.getppid()))
"""


def told(program: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", program, *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout.split()


@pytest.mark.skipif(os.uname().machine not in (X86, ARM), reason="there is no filter for this architecture")
def test_without_rules_for_signals_the_filter_protects_the_driver_the_keeper_and_their_groups() -> None:
    assert told(FILTER_ALONE) == ["True", *["refused"] * 5, "-9"]


def test_a_process_tells_which_protections_the_kernel_lacks() -> None:
    assert told(WITHOUT) == ["Landlock", "and", "seccomp"]


@needs_file_rules
@pytest.mark.parametrize(
    ("abi", "expected"),
    [
        (0, ["False", "False", "moved", "written", "written"]),
        (1, ["False", "False", "kept", "written", "refused"]),
        (2, ["False", "False", "moved", "written", "refused"]),
        (5, ["False", "False", "moved", "written", "refused"]),
        pytest.param(
            6,
            ["True", "True", "moved", "written", "refused"],
            marks=pytest.mark.skipif(version() < 6, reason="needs Linux 6.12"),
        ),
    ],
)
def test_each_version_of_landlock_is_used_as_far_as_it_goes(abi: int, expected: list[str], tmp_path: Path) -> None:
    assert told(SMALL_VERSION, str(abi), str(tmp_path)) == expected


def verdict(program: list[Instruction], architecture: int, number: int, *arguments: int) -> int:
    """Return the error with which the filter answers a call, 0 if it allows it."""
    words = {
        0: number,
        4: architecture,
        **{16 + 8 * place: value & 0xFFFFFFFF for place, value in enumerate(arguments)},
    }
    holds: dict[int, Callable[[int, int], bool]] = {
        0x15: lambda loaded, value: loaded == value,
        0x35: lambda loaded, value: loaded >= value,
        0x45: lambda loaded, value: bool(loaded & value),
    }
    loaded = place = 0
    while True:
        operation, then, otherwise, value = program[place]
        place += 1
        if operation == 0x06:
            return value & 0xFFFF if value >> 16 == 5 else 0
        if operation == 0x20:
            loaded = words.get(value, 0)
        else:
            place += then if holds[operation](loaded, value) else otherwise


@pytest.mark.parametrize(("machine", "architecture"), [(X86, NUMBER_OF_X86), (ARM, NUMBER_OF_ARM)])
def test_the_filter_decides_by_the_arguments(machine: str, architecture: int) -> None:
    own, other, is_arm = 77, 78, machine == ARM
    program = filter_program(machine, own)

    def error(number: int, *arguments: int) -> int:
        return verdict(program, architecture, number, *arguments)

    for number in (261, 118, 119, 122, 274, 238, 239) if is_arm else (302, 142, 144, 203, 314, 256, 279):
        assert [error(number, pid) for pid in (0, own, other, -1)] == [0, 0, errno.EPERM, errno.EPERM]
    for number, kind in ((140, 0), (30, 1)) if is_arm else ((141, 0), (251, 1)):
        targets = [(kind, 0), (kind, own), (kind, other), (kind + 1, 0), (kind + 2, 0)]
        assert [error(number, *target) for target in targets] == [0, 0] + [errno.EPERM] * 3
    for number in (272, 270, 271, 241, 440, 448, 438) if is_arm else (312, 310, 311, 298, 440, 448, 438):
        assert error(number, own) == errno.EPERM
    ptrace, clone, kill = (117, 220, 129) if is_arm else (101, 56, 62)
    assert [error(ptrace, request) for request in (0, 16, 0x4206, 7)] == [0, errno.EPERM, errno.EPERM, 0]
    assert [error(clone, flags) for flags in (17, 0x3D0F00, 0x8011)] == [0, 0, errno.EPERM]
    assert error(435) == errno.ENOSYS
    assert [error(kill, other), error(424)] == [0, 0], "Landlock decides"
    protecting = filter_program(machine, own, (-1, other))
    verdicts = [verdict(protecting, architecture, kill, pid) for pid in (own, other, -1)]
    assert verdicts == [0, errno.EPERM, errno.EPERM]
    assert verdict(program, 0x40000003, 1) == errno.ENOSYS, "a call of 32 bits"
    assert error(0x40000000 + 302, other) == errno.ENOSYS, "a call of x32"
