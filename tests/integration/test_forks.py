"""A child forked after `init`, of the driver or of a worker, cannot hang and cannot disturb its parent."""

from __future__ import annotations

import json
import re
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from tests import forked_python
from tests.integration.worlds import MARK, environment, free_port, processes_with

PROGRAM = str(Path(__file__).with_name("forking.py"))
SOON_S = 20.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "num_devices"), [("torchrun", 2), pytest.param("ray", 2, marks=pytest.mark.nightly)]
)
def test_a_forked_child_ends_and_its_parent_goes_on_until_ray_loses_its_control_service(
    models: dict[str, Path], launcher: str, num_devices: int
) -> None:
    mark, python = uuid.uuid4().hex, [forked_python.python()]
    if launcher == "torchrun":
        python += ["-m", "torch.distributed.run", f"--nproc_per_node={num_devices}", f"--master_port={free_port()}"]
    ran = subprocess.run(
        [*python, PROGRAM, str(models["llama"]), launcher, str(num_devices)],
        env=environment(**{MARK: mark}),
        capture_output=True,
        text=True,
        timeout=280,
    )
    ended = time.time()
    assert processes_with(MARK, mark) == []
    found = json.loads(next((line for line in ran.stdout.splitlines() if line.startswith("{")), ran.stderr))
    assert found.pop("raises") == 1
    assert found.pop("in a worker") == [[3] * num_devices, [1] * num_devices, [0] * num_devices]
    assert found.pop("parent") == [[7]] * num_devices
    assert set(found.values()) == {0}, found
    if launcher != "ray":
        assert ran.returncode == 0, ran.stderr
        return
    assert ran.returncode == 1
    assert "WorkerError: Ray's control service (GCS) has ended" in ran.stderr
    killed = re.search(r"killed at ([\d.]+)", ran.stdout)
    assert killed is not None
    assert ended - float(killed[1]) < SOON_S
