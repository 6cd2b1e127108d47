"""Fault points: an armed fault happens once, to a process that is in its phase."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlite.testing import FaultBoard, InjectedError, PhaseFault

REACH = """
import sys
from rlite.testing import FaultBoard
FaultBoard(sys.argv[1]).reach('reward', 'JUDGE')
"""


def test_an_error_is_raised_once_in_its_phase_and_role(tmp_path: Path) -> None:
    board = FaultBoard(tmp_path)
    board.reach("rollout", "ROLLOUT")
    board.arm(PhaseFault(phase="rollout", kind="raise", role="ROLLOUT", skip=1))
    board.reach("reward", "ROLLOUT")
    board.reach("rollout", "ACTOR")
    board.reach("rollout", "ROLLOUT")
    assert board.is_armed
    with pytest.raises(InjectedError, match="injected: raise in rollout of ROLLOUT"):
        board.reach("rollout", "ROLLOUT")
    assert not board.is_armed
    board.reach("rollout", "ROLLOUT")


def test_a_signal_hits_one_process_of_several(tmp_path: Path) -> None:
    FaultBoard(tmp_path).arm(PhaseFault(phase="reward", kind="SIGKILL", role=""))
    processes = [subprocess.Popen([sys.executable, "-c", REACH, str(tmp_path)]) for _ in range(3)]
    assert sorted(process.wait(60) for process in processes) == [-signal.SIGKILL, 0, 0]


def test_a_process_waits_in_its_phase_for_a_fault_from_outside(tmp_path: Path) -> None:
    board = FaultBoard(tmp_path)
    board.arm(PhaseFault(phase="checkpoint", kind="master", role=""))
    waiting = threading.Thread(target=board.reach, args=("checkpoint", "ACTOR", "node-1"))
    waiting.start()
    while (request := board.request()) is None:
        waiting.join(0.01)
    assert (request["kind"], request["place"]) == ("master", "node-1")
    assert waiting.is_alive()
    board.serve()
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_fault_that_was_taken_back_does_not_happen(tmp_path: Path) -> None:
    board = FaultBoard(tmp_path)
    board.arm(PhaseFault(phase="rollout", kind="raise", role=""))
    board.disarm()
    board.reach("rollout", "ROLLOUT")
