"""A guard ends what was started under its mark, and nothing else: on close, and when its program is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from rlite.runtime.cluster.guard import MARK, Guard, watch

SLEEP = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
PROGRAM = f"""
import subprocess, time
from rlite.runtime.cluster.guard import Guard
guard = Guard()
with guard.marking():
    inside = subprocess.Popen({SLEEP})
outside = subprocess.Popen({SLEEP}, start_new_session=True)
print(inside.pid, outside.pid, flush=True)
time.sleep(600)
"""


def companions(program: psutil.Process) -> list[psutil.Process]:
    """Companions of a program's guards, with the shells that started them."""
    return [each for each in program.children(recursive=True) if "guard.py" in " ".join(each.cmdline())]


def test_killed_program_ends_marked_processes() -> None:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    inside, outside = (psutil.Process(int(pid)) for pid in program.stdout.readline().split())
    found = companions(psutil.Process(program.pid))
    assert found
    try:
        program.send_signal(signal.SIGKILL)
        program.wait()
        inside.wait(timeout=30)
        for companion in found:
            companion.wait(timeout=30)
        assert outside.is_running()
    finally:
        outside.kill()


def test_a_program_that_kills_its_children_before_itself_leaves_no_grandchild() -> None:
    grandchild = f"import subprocess; print(subprocess.Popen({SLEEP}, start_new_session=True).pid, flush=True); input()"
    code = f"""
import subprocess, sys
from rlite.runtime.cluster.guard import own_children
own_children()
child = subprocess.Popen([sys.executable, "-c", {grandchild!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(child.stdout.readline().decode(), flush=True)
input()
"""
    program = psutil.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    orphan = psutil.Process(int(program.stdout.readline()))
    found = companions(program)
    for child in sorted(program.children(), key=lambda each: each.pid):  # as a Ray worker does
        child.kill()
    program.kill()
    program.wait()
    for process in [orphan, *found]:
        process.wait(timeout=30)


def test_a_guard_whose_program_has_ended_already_ends_what_is_left() -> None:
    mark = "a" * 32
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = subprocess.Popen(SLEEP, env={**os.environ, MARK: mark})
    watch(mark, ended.pid)
    assert left.wait(timeout=30) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not show the memory of the environment")
def test_a_process_whose_title_is_written_over_its_first_variables_is_found() -> None:
    overwrite = "ctypes.memset(int(open('/proc/self/stat').read().rpartition(')')[2].split()[47]), 0, 4)"
    guard = Guard()
    with guard.marking():
        program = [sys.executable, "-c", f"import ctypes; {overwrite}; print(flush=True); input()"]
        titled = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert titled.stdout is not None
    titled.stdout.readline()
    assert psutil.Process(titled.pid).environ() == {}
    guard.close(patience_s=0.1)
    assert titled.wait(timeout=30) is not None
    assert not psutil.pid_exists(titled.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not show the memory of the environment")
def test_a_process_whose_environment_is_overwritten_is_found_with_its_children() -> None:
    child = f"import subprocess; print(subprocess.Popen({SLEEP}, env={{}}).pid, flush=True); input()"
    guard = Guard()
    with guard.marking():
        parent = subprocess.Popen([sys.executable, "-c", child], env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    orphan = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    guard.close(patience_s=0.1)
    orphan.wait(timeout=30)


def test_guard_inside_a_marked_program_outlives_the_end_of_marked_processes() -> None:
    program = "from rlite.runtime.cluster.guard import Guard; print(Guard()._shell.pid, flush=True); input()"
    guard = Guard()
    with guard.marking():
        marked = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert marked.stdout is not None
    companion = psutil.Process(int(marked.stdout.readline()))
    guard.end()
    assert marked.wait(timeout=30) is not None
    assert companion.is_running()
    guard.close()
    companion.wait(timeout=30)  # its program is gone, and nothing is left to end


def test_close_ends_running_processes() -> None:
    guard = Guard()
    with guard.marking():
        inside = subprocess.Popen(SLEEP)
    outside = subprocess.Popen(SLEEP)
    try:
        guard.close(patience_s=0.1)
        assert inside.wait(timeout=100) is not None
        assert not psutil.pid_exists(inside.pid)
        assert outside.poll() is None
        assert companions(psutil.Process()) == []
    finally:
        outside.kill()
        outside.wait()


def test_the_mark_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard()
    with guard.marking():
        pass
    child = subprocess.run([sys.executable, "-c", "import os; print(os.environ.get('RLITE_OWNED_BY'))"],
                           capture_output=True, text=True)  # fmt: skip
    assert child.stdout == "None\n"
    guard.close()
