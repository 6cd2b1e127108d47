"""A `python` whose programs start in a moment: they are forks of one process that has imported what they need.

A program that imports rlite's engines spends four seconds on it. `python()` is an executable that does what
`sys.executable` does, for tests in which the start itself is not what is tested: its programs share their string hash
seed, are not children of the process that starts them, and do not tear down their modules at the end.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

FOLDER = "RLITE_TEST_FORKED_PYTHON"
CLIENT = "RLITE_TEST_CLIENT"
"""environment variable of a program: id of the process of the executable"""
RANKS = "RLITE_TEST_RANKS"
"""If "children", torchrun forks its ranks, which are its children then. PYTHON_EXEC does not count."""
ROOT = Path(__file__).parents[2]
ROOM = 32_768
"""bytes of the largest environment of a program"""


def prepare(folder: Path) -> None:
    """Put the executable into the folder. Its server starts with the first program, and ends with this process."""
    os.environ[FOLDER] = str(folder)
    if not sys.platform.startswith("linux"):
        (folder / "python").symlink_to(sys.executable)
        return
    source = Path(__file__).with_name("client.py").read_text()
    (folder / "python").write_text(f"#!{sys.executable} -SE\n{source}")
    changes = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RLITE_TEST_ROOM": "_" * ROOM}
    environment = [f"{name}={value}" for name, value in {**os.environ, **changes}.items()]
    server = [sys.executable, str(Path(__file__).with_name("server.py")), str(folder), str(os.getpid())]
    (folder / "start").write_text(f"#!/bin/sh\nexec {shlex.join(['env', '-i', *environment, *server])}\n")
    for name in ("python", "start"):
        (folder / name).chmod(0o755)


def python() -> str:
    """The executable."""
    return os.path.join(os.environ[FOLDER], "python")


class System:
    """The module `sys` for a module that starts programs by `sys.executable`: they are run by the executable here."""

    @property
    def executable(self) -> str:
        return python()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


def for_workers(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Let Ray start its workers by the executable: Ray calls RAY_RUNTIME_ENV_HOOK in each program that connects."""
    return {"py_executable": python(), **(runtime_env or {})}
