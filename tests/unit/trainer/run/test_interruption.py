"""A signal ends a command also if Python ignores the exception that the signal has raised."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
from rlite.trainer.run.command import run

class Slow:
    def __del__(self):
        os.kill(os.getpid(), signal.Signals[sys.argv[1]])
        for _ in range(1000):
            pass

class Broken:
    def __del__(self):
        raise ValueError("other errors are told as before")

def main(arguments):
    Broken()
    Slow()
    print("goes on", flush=True)
    time.sleep(60)

run("sft", main, [])
"""


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_in_a_finalizer_is_not_lost(name: str, status: int) -> None:
    command = [sys.executable, "-c", PROGRAM, signal.Signals[name].name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout) == (status, "goes on\n")
    assert f"rlite sft: ended by {name}. The run had not begun" in ended.stderr
    assert "KeyboardInterrupt" not in ended.stderr
    assert "ValueError: other errors are told as before" in ended.stderr
