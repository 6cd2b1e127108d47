"""A signal ends a command also if Python ignores the exception that the signal has raised."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from rlite.assembly.command import run

PROGRAM = """
import os, signal, sys, time
from rlite.assembly.command import run

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


def test_a_sigterm_is_named_if_other_code_replaces_its_exception(capsys: pytest.CaptureFixture[str]) -> None:
    def main(arguments: Sequence[str]) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as ended:
            run("launch", main, [])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ended.value.code == 143
    assert "rlite launch: ended by SIGTERM." in capsys.readouterr().err
