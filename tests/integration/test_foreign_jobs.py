"""Examples that run programs of other libraries under the control plane: one is killed, and the result is the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests import forked_python
from tests.integration.worlds import MARK, environment, free_port, processes_with

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples" / "control"
PEERS = Path(sys.prefix) / "peers"
START_S = 240.0


def wait_for(is_there: Callable[[], Any], program: subprocess.Popen[str]) -> Any:
    deadline = time.monotonic() + START_S
    while not (found := is_there()):
        assert program.poll() is None, program.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def start(*command: str, **changes: str) -> subprocess.Popen[str]:
    """Start a program as a fork; the ranks that the control plane starts are no forks."""
    return subprocess.Popen(
        [forked_python.python(), *command],
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(program: subprocess.Popen[str]) -> str:
    output, _ = program.communicate(timeout=START_S)
    assert program.returncode == 0, output
    return output


@pytest.mark.nightly
def test_a_torchrun_script_resumes_after_a_killed_rank_and_learns_the_same(tmp_path: Path) -> None:
    script, whole, broken = EXAMPLES / "ddp_script.py", tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}")
    output_of(start(*torchrun, str(script), str(whole), "200"))
    mark = str(tmp_path)
    program = start(str(EXAMPLES / "torchrun_script.py"), str(broken), "200", **{MARK: mark})
    wait_for((broken / "checkpoint.pt").exists, program)
    own = processes_with(MARK, mark)  # those of other tests may end meanwhile
    (victim,) = [each for each in processes_with("RANK", "1") if each in own and str(broken) in each.cmdline()]
    os.kill(victim.pid, signal.SIGKILL)
    output = output_of(program)
    assert "job succeeded; restarts of the trainer: 1" in output
    assert "died with <Signals.SIGKILL: 9>" in output
    found, expected = (torch.load(folder / "checkpoint.pt") for folder in (broken, whole))
    assert found["step"] == expected["step"] == 200
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in expected["model"].items())
    assert processes_with(MARK, mark) == []


@pytest.mark.nightly
@pytest.mark.skipif(not (PEERS / "trl").is_dir(), reason="`make test` installs TRL for the tests")
def test_a_trl_trainer_resumes_from_its_own_checkpoint_after_a_kill_and_learns_the_same(tmp_path: Path) -> None:
    whole, broken, mark = tmp_path / "whole", tmp_path / "broken", str(tmp_path)
    only_trl = tmp_path / "only_trl"  # other peers ship a package named `tests`
    only_trl.mkdir()
    for part in PEERS.glob("trl*"):
        (only_trl / part.name).symlink_to(part)
    path = os.pathsep.join([environment()["PYTHONPATH"], str(EXAMPLES), str(only_trl)])
    alone = "import sys, pathlib, trl_sft; trl_sft.train(pathlib.Path(sys.argv[1]), 100)"
    output_of(start("-c", alone, str(whole), PYTHONPATH=path))
    program = start(str(EXAMPLES / "trl_sft.py"), str(broken), "100", **{"PYTHONPATH": path, MARK: mark})
    wait_for(lambda: list(broken.glob("checkpoint-*/trainer_state.json")), program)
    (victim,) = [each for each in processes_with(MARK, mark) if is_workload(each)]
    os.kill(victim.pid, signal.SIGKILL)
    output = output_of(program)
    assert "job succeeded; restarts of the trainer: 1" in output
    assert f"process {victim.pid}: from None" in output
    assert "from " + str(broken / "checkpoint-") in output
    found, expected = (load_file(folder / "final" / "model.safetensors") for folder in (broken, whole))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert processes_with(MARK, mark) == []


def is_workload(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[0].startswith("ray::Sft")
    except (psutil.Error, IndexError):
        return False
