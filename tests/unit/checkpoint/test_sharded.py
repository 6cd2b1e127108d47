"""A checkpoint's writing is killed at each file that it touches; what was there before can always be loaded."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests import forked_python

ROOT = Path(__file__).parents[3]
PROGRAM = """
import itertools, json, os, shutil, signal, sys
from pathlib import Path

import torch
import torch.distributed as dist

from rlite.runtime.storage import sharded
from rlite.runtime.storage.atomic import staging, verify
from rlite.runtime.parallel.processes import join_alone

path = Path(sys.argv[1])
backup = path.with_name("backup")


def trained():
    join_alone("cpu")
    module = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    return module, optimizer


def save(step):
    module, optimizer = trained()
    torch.nn.init.constant_(module.weight, step)
    state = sharded.snapshot(sharded.Trained(module, optimizer), is_copied=True)
    sharded.start_writing(state, staging(path), path, {"step": step}, 0, dist.group.WORLD).result()


def load():
    module, optimizer = trained()
    sharded.load(path, sharded.Trained(module, optimizer), 0, dist.group.WORLD)
    assert module.weight.eq(verify(path)["step"]).all()


def killed_at(fatal):
    events = itertools.count(1)

    def look(event, arguments):
        touches = event == "open" or event.startswith(("os.", "shutil."))
        if touches and str(path.parent) in str(arguments) and next(events) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    save(2)


def in_a_child(function, *arguments):
    child = os.fork()
    if child == 0:
        try:
            function(*arguments)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


assert in_a_child(save, 1) == 0
assert in_a_child(load) == 0
shutil.copytree(path, backup)
for fatal in itertools.count(1):
    ended = in_a_child(killed_at, fatal)
    print(json.dumps({"ended": ended, "step": verify(path)["step"]}), flush=True)  # no byte of it has changed
    if ended == 0:
        assert in_a_child(load) == 0
        break
    for folder in path.parent.iterdir():
        if folder != backup and fatal % 3 == 0:  # otherwise the next one finds what this one left
            shutil.rmtree(folder)
    if not path.exists() or verify(path)["step"] == 2:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(backup, path)
"""


@pytest.mark.slow
def test_a_write_that_is_killed_at_any_file_leaves_what_can_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    ran = subprocess.run(
        [forked_python.python(), "-c", PROGRAM, str(tmp_path / "state" / "checkpoint")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    *killed, last = (json.loads(line) for line in ran.stdout.splitlines())
    assert last == {"ended": 0, "step": 2}
    assert len(killed) > 10
    assert all(outcome["ended"] == -9 for outcome in killed), killed
    steps = [outcome["step"] for outcome in killed]
    assert set(steps) == {1, 2}, "before it is published, and after"
    assert steps[::3] == sorted(steps[::3]), "those that find nothing left by the one before touch the same files"
