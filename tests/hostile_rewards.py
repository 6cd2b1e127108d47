"""Attacks of a reward on the program that asked for it: small functions, to be run in reward processes.

`attack` does one of ATTACKS, itself or by `exec`, as a function does that runs what a model has written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rlite.runtime.sandbox.confine import children

SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "MY_PASSWORD")
FAIR = 0.25
"""reward of a call that does nothing"""


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def open_descriptors() -> list[int]:
    """All of them: the program that asked may hold hundreds, and a process keeps the numbers that it is given."""
    return sorted(map(int, os.listdir("/proc/self/fd")))


def sockets() -> list[int]:
    """Descriptors that lead to other processes."""
    found = []
    for descriptor in open_descriptors():
        with contextlib.suppress(OSError):
            if descriptor > 2 and os.readlink(f"/proc/self/fd/{descriptor}").startswith(("socket:", "pipe:")):
                found.append(descriptor)
    return found


def write_to_all(data: bytes) -> None:
    """Write to any listener, until the data is taken or no listener is left."""
    for descriptor in sockets():
        with contextlib.suppress(OSError):
            os.write(descriptor, data)


def frame(text: str, raw: bytes = b"") -> bytes:
    """A frame of rlite.runtime.sandbox.wire."""
    return struct.pack("<II", len(text), len(raw)) + text.encode() + raw


def pickle_bomb(marker: str) -> None:
    """The old wire's frame, and one that is sound but for what it carries."""
    blob = pickle.dumps(("value", 0, 0.0, Bomb(f"touch {marker}")))
    write_to_all(struct.pack("<Q", len(blob)) + blob)
    write_to_all(frame(f'["value",0,{{"b":{len(blob)}}}]', blob))
    time.sleep(60)


def forge(marker: str) -> None:
    """Answers for calls that it was not given."""
    for number in (0, 1, 2, 2**40):
        write_to_all(frame(f'["value",{number},1000.0]') * 2)
    time.sleep(60)


def server() -> Any:
    """Return the object that runs calls in this process."""
    return next(one for one in gc.get_objects() if type(one).__name__ == "Server")


def forge_ends(marker: str) -> None:
    """The end of a fork by a signal that there is not, in the name of its own call."""
    server().say("ended", -1000)
    time.sleep(60)


def flood(marker: str) -> None:
    """Garbage as fast as it is taken."""
    while True:
        write_to_all(b"\xff" * (1 << 16))


def flood_of_frames(marker: str) -> None:
    """Valid frames that no call waits for."""
    while True:
        write_to_all(frame('["ready",0,null]') * 1000)


def large_answer(marker: str) -> None:
    """A frame of 60 MB."""
    for descriptor in sockets():
        rest = memoryview(struct.pack("<II", 20, 60 << 20) + bytes(60 << 20))
        with contextlib.suppress(OSError):
            while rest:
                rest = rest[os.write(descriptor, rest) :]
    time.sleep(60)


def endless_frame(marker: str) -> None:
    """A frame that is begun."""
    write_to_all(struct.pack("<II", 1000, 1000))
    while True:
        time.sleep(0.01)
        write_to_all(b" ")


def deep_answer(marker: str) -> None:
    """A value that is nested deeper than Python can go."""
    write_to_all(frame("[" * 100_000))
    time.sleep(60)


def leave(marker: str) -> None:
    """The process ends."""
    os._exit(3)


def stop_clocks(marker: str) -> None:
    """Time stands still, and it hangs."""
    for name in ("monotonic", "perf_counter", "time", "monotonic_ns"):
        setattr(time, name, lambda: 0)
    time.sleep(60)


def many_forks(marker: str) -> None:
    """A chain of processes in sessions of their own, which hold what was open."""
    for _ in range(40):
        if os.fork() != 0:
            break
        os.setsid()
    time.sleep(3600)


def endless_forks(marker: str) -> None:
    """A chain of processes of which each lives for a moment, in sessions of their own."""
    while os.fork() == 0:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
    time.sleep(60)


ENDS = {
    pickle_bomb: ("crash",),
    forge: ("crash",),
    forge_ends: ("crash",),
    flood: ("crash",),
    flood_of_frames: ("crash",),
    large_answer: ("crash",),
    endless_frame: ("timeout", "crash"),
    deep_answer: ("crash",),
    leave: ("crash",),
    stop_clocks: ("timeout",),
    many_forks: ("timeout",),
    endless_forks: ("timeout",),
}
"""attacks, with the outcomes that one call of each may have"""
ATTACKS = {function.__name__: function for function in ENDS}


def attack(name: str, marker: str, is_foreign: bool = False) -> float:
    """Attack, or return FAIR where the name is empty."""
    if not name:
        return FAIR
    if is_foreign:
        exec("import os\nrun(marker)", {"run": ATTACKS[name], "marker": marker})
    else:
        ATTACKS[name](marker)
    return FAIR


def change_everything(is_foreign: bool) -> float:
    """Change what calls share; returns what is left of it from the call before, and leaves it so."""
    code = """
import builtins, json, os, random, resource, signal, sys, time
left = [json.dumps(1) != "1", os.getcwd() == "/", "HOSTILE" in os.environ, abs(-1) != 1, time.time() == 0,
        resource.getrlimit(resource.RLIMIT_CORE)[0] == 7, signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,
        signal.getitimer(signal.ITIMER_REAL)[0] > 0, os.umask(0o22) == 0o77, sys.getrecursionlimit() == 200,
        "/hostile" in sys.path]
json.dumps = lambda value: "forged"
builtins.abs = lambda value: 1000.0
time.time = time.monotonic = time.perf_counter = lambda: 0
os.chdir("/"); os.umask(0o77); os.environ["HOSTILE"] = "1"; sys.path.insert(0, "/hostile"); sys.setrecursionlimit(200)
resource.setrlimit(resource.RLIMIT_CORE, (7, resource.getrlimit(resource.RLIMIT_CORE)[1]))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.setitimer(signal.ITIMER_REAL, 1000)
"""
    names: dict[str, Any] = {}
    exec(code, names)
    return float(sum(names["left"]))


def change_everything_itself(**call: Any) -> float:
    """The same by code of the function's own."""
    import builtins
    import json
    import resource
    import signal

    left = [
        json.dumps(1) != "1",
        os.getcwd() == "/",
        "HOSTILE" in os.environ,
        abs(-1) != 1,
        time.time() == 0,
        resource.getrlimit(resource.RLIMIT_CORE)[0] == 7,
        signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,
        signal.getitimer(signal.ITIMER_REAL)[0] > 0,
    ]
    json.dumps = lambda value: "forged"  # type: ignore[assignment]
    builtins.abs = lambda value: 1000.0  # type: ignore[assignment]
    time.time = time.monotonic = time.perf_counter = lambda: 0.0
    os.chdir("/")
    os.environ["HOSTILE"] = "1"
    resource.setrlimit(resource.RLIMIT_CORE, (7, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    return float(sum(left))


def lower_hard_limits(**call: Any) -> float:
    """Take away what cannot be given back; returns whether the call before has."""
    import resource

    was = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))
    return float(was[1] == 1000)


def count_secrets(parent: int) -> float:
    """Secrets that it finds in its environment, and more if it can read its parent's."""
    found = sum(name in os.environ for name in SECRETS)
    with contextlib.suppress(OSError):
        found += Path(f"/proc/{parent}/environ").read_bytes() != b""
    with contextlib.suppress(OSError):
        found += subprocess.run(["cat", f"/proc/{parent}/environ"], capture_output=True).stdout != b""
    return float(found)


def count_descriptors(**call: Any) -> float:
    """Count open descriptors other than sockets, /dev/null, anonymous inodes, /proc, and sealed prints."""
    links = {each: os.readlink(f"/proc/self/fd/{each}") for each in open_descriptors() if _is_open(each)}
    usual = ("socket:", "/dev/null", "anon_inode:", "/proc")
    others = [descriptor for descriptor, link in links.items() if not link.startswith(usual)]
    return float(sum(not (links[each].startswith("/memfd:rlite-prints") and _is_sealed(each)) for each in others))


def _is_sealed(descriptor: int) -> bool:
    """Whether the file keeps its size."""
    for size in (0, 1 << 30):
        with contextlib.suppress(PermissionError):
            os.truncate(descriptor, size)
            return False
    return True


def _is_open(descriptor: int) -> bool:
    return os.path.islink(f"/proc/self/fd/{descriptor}")


def end_parent(is_foreign: bool = False) -> float:
    """Kill the keeper and the trainer, or what a fork descends from; returns how many of them refused that."""
    exec("pass") if is_foreign else None
    refused, pid = 0.0, os.getpid()
    for _ in range(2):
        with open(f"/proc/{pid}/stat") as stat:
            pid = int(stat.read().rpartition(")")[2].split()[1])
        try:
            os.kill(pid, 9)
        except PermissionError:
            refused += 1
    return refused


def start_program(code: str, keep: bool = False, go: str = "") -> float:
    """Run a program, as a function does that tests what a model has written; returns the number of its children.

    With `go` a daemon that an earlier call has left gets its sign, and the time to do what it waits to do.
    """
    global kept
    if go:
        Path(go).touch()
        time.sleep(0.5)
    if keep and kept is None:
        kept = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    subprocess.run([sys.executable, "-c", code], check=False)
    return float(len(children(os.getpid())))


kept: subprocess.Popen[bytes] | None = None
DAEMON = """
import os, signal, time
reward_process = os.getppid()
if os.fork() == 0:
    os.setsid()
    while not os.path.exists(GO):
        time.sleep(0.01)
    os.kill(reward_process, signal.SIGKILL)
"""


def reach(target: int, origin: str) -> list[str]:
    """Reach for another process in every way; returns the ways that have worked."""
    if origin == "made code":
        names: dict[str, Any] = {"reach": reach, "target": target}
        exec("found = reach(target, 'own code')", names)
        return list(names["found"])
    if origin == "a program":
        code = f"from tests.hostile_rewards import reach; print(*reach({target}, 'own code'), sep=',')"
        root = Path(__file__).resolve().parents[1]
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
        return [name for name in done.stdout.strip().split(",") if name]
    reached = []
    for name, attempt in attempts(target).items():
        try:
            attempt()
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES, errno.ENOENT):
                continue  # by any other error, the kernel has tried it
        reached.append(name)
    return reached


def attempts(target: int) -> dict[str, Any]:
    """Return functions that reach for a process, by the name of the way; each raises OSError if it is refused."""
    library = ctypes.CDLL(None, use_errno=True)
    is_arm = os.uname().machine == "aarch64"

    def call(on_x86: int, on_arm: int, *arguments: Any) -> int:
        result = int(library.syscall(on_arm if is_arm else on_x86, *arguments))
        if result < 0:
            raise OSError(ctypes.get_errno(), "refused")
        return result

    def write(path: str, text: str) -> None:
        with open(path, "w") as file:
            file.write(text)

    def be_born_as_a_sibling() -> None:
        if call(56, 220, 0x8000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:
            os._exit(0)

    def send_by_descriptor() -> None:
        signal.pidfd_send_signal(os.pidfd_open(target), 0)

    own, theirs = ctypes.create_string_buffer(8), ctypes.create_string_buffer(struct.pack("@PQ", 4096, 8))
    parts = struct.pack("@PQ", ctypes.addressof(own), 8)
    return {
        "limits": lambda: resource.prlimit(target, resource.RLIMIT_CPU, resource.prlimit(target, resource.RLIMIT_CPU)),
        "priority": lambda: os.setpriority(os.PRIO_PROCESS, target, os.getpriority(os.PRIO_PROCESS, target)),
        "priority of the user": lambda: call(141, 140, 2, 61_234, 5),
        "priority of the group": lambda: call(141, 140, 1, 4_000_000, 5),
        "affinity": lambda: os.sched_setaffinity(target, os.sched_getaffinity(target)),
        "scheduler": lambda: os.sched_setscheduler(target, os.SCHED_BATCH, os.sched_param(0)),
        "attributes": lambda: call(314, 274, target, struct.pack("=IIQiIQQQ", 48, 3, 0, 0, 0, 0, 0, 0), 0),
        "I/O priority": lambda: call(251, 30, 1, target, 0),
        "comparison": lambda: call(312, 272, target, os.getpid(), 1, 0, 0),
        "reading memory": lambda: call(310, 270, target, parts, 1, bytes(theirs), 1, 0),
        "advice": lambda: call(440, 440, os.pidfd_open(target), parts, 1, 21, 0),
        "descriptor": lambda: call(438, 438, os.pidfd_open(target), 0, 0),
        "tracing": lambda: call(101, 117, 0x4206, target, 0, 0),
        "pages": lambda: call(256, 238, target, 64, bytes(8), bytes(8)),
        "measurement": lambda: call(298, 241, bytes(128), target, -1, -1, 0),
        "parent": be_born_as_a_sibling,
        "signal": lambda: os.kill(target, 0),
        "signal to a thread": lambda: call(200, 130, target, 0),
        "signal by descriptor": send_by_descriptor,
        "memory score": lambda: write(f"/proc/{target}/oom_score_adj", "0"),
        "memory": lambda: write(f"/proc/{target}/mem", ""),
        "group of the scheduler": lambda: write(f"/proc/{target}/autogroup", "0"),
        "content of dumps": lambda: write(f"/proc/{target}/coredump_filter", "0"),
        "name": lambda: write(f"/proc/{target}/task/{target}/comm", "x"),
        "control group": lambda: write("/sys/fs/cgroup/cgroup.procs", str(target)),
        "environment": lambda: Path(f"/proc/{target}/environ").read_bytes(),
    }
