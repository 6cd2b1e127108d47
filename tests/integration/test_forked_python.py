"""A forked program ends, is killed and is found like a program that `sys.executable` started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlite.runtime.cluster.guard import Guard, marked
from tests import forked_python
from tests.integration.worlds import MARK, environment, processes_with

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sys.executable itself elsewhere")
SOON_S = 20.0
WAIT = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def test_a_program_has_the_arguments_and_files_and_gives_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, sys\nprint(__name__, sys.argv, os.getcwd(), input(), os.environ['A'])\nsys.exit(3)"
    )
    done = subprocess.run(
        [forked_python.python(), "-u", "program.py", "-x", "y"],
        cwd=tmp_path,
        env=environment(A="b"),
        input="typed\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout == f"__main__ ['program.py', '-x', 'y'] {tmp_path} typed b\n"
    raised = subprocess.run([forked_python.python(), "-c", "1 / 0"], capture_output=True, text=True)
    assert raised.returncode == 1
    assert raised.stderr.endswith("ZeroDivisionError: division by zero\n")
    killed = subprocess.run([forked_python.python(), "-c", "import os; os.kill(os.getpid(), 9)"])
    assert killed.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_program_which_is_found_by_its_environment_until_then(number: int) -> None:
    mark = f"signal {number} of {os.getpid()}"
    process = subprocess.Popen(
        [forked_python.python(), "-c", WAIT], env=environment(**{MARK: mark}), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    found = processes_with(MARK, mark)
    assert {each.pid for each in found} == {process.pid, pid}
    process.send_signal(number)
    assert process.wait(SOON_S) == -number
    _, left = psutil.wait_procs(found, timeout=SOON_S)
    assert left == []
    process.stdout.close()


@pytest.mark.nightly
def test_a_guard_whose_program_comes_first_does_not_own_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(forked_python.FOLDER, str(tmp_path))
    forked_python.prepare(tmp_path)
    guard = Guard()
    with guard.marking():
        program = subprocess.Popen([forked_python.python(), "-c", WAIT], stdout=subprocess.PIPE)
    assert program.stdout is not None
    pid = int(program.stdout.readline())
    assert {each.pid for each in marked(next(iter(guard.mark.values())))} == {program.pid, pid}
    guard.close(patience_s=0.0)
    assert not psutil.pid_exists(pid)
    program.wait(SOON_S)
    program.stdout.close()
    assert subprocess.run([forked_python.python(), "-c", "exit(7)"], timeout=SOON_S).returncode == 7


def test_programs_draw_different_random_numbers() -> None:
    program = "import random, uuid, numpy; print(random.random(), uuid.uuid4(), numpy.random.rand())"
    command = [forked_python.python(), "-c", program]
    one, two = (subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(2))
    assert all(a != b for a, b in zip(one, two, strict=True))
