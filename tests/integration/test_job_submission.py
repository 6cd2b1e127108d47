"""`rlite launch job.yaml address=http://...`: a job server of Ray runs the command on the cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rlite.control import command
from rlite.errors import ConfigError
from tests.integration.worlds import environment, free_port, processes_with

pytestmark = pytest.mark.slow
PEERS = Path(os.environ.get("RLITE_TEST_PEERS", f"{sys.prefix}/peers"))
"""folder into which `make test` installs the packages of Ray's dashboard, for this test alone"""
NEEDED = ("aiohttp_cors", "opencensus", "opentelemetry/exporter/prometheus", "prometheus_client")
HAS_DASHBOARD = all((PEERS / name).is_dir() for name in NEEDED)
START_S = 120.0
MARK = "RLITE_TEST_CLUSTER"
JOB = """
device_per_node: 1
device_type: CPU
trainer: submitted_program
config: {{out: {out}, steps: 1}}
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a job whose program exists only there."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "submitted_program.py").write_text("from tests.integration.reporting_program import main\n\nmain()\n")
    (folder / "job.yaml").write_text(JOB.format(out=tmp_path))
    (tmp_path / "step-0").write_text("")
    monkeypatch.chdir(folder)
    return folder


def test_without_a_job_server_the_message_says_what_to_install(job: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no Ray job server answers at address=http://127\.0\.0\.1:\d+.*ray\[default\]"
    ):
        command.launch(["job.yaml", f"address=http://127.0.0.1:{free_port()}"])


def test_a_job_file_outside_of_the_folder_is_refused(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job / "inner").mkdir()
    monkeypatch.chdir(job / "inner")
    monkeypatch.syspath_prepend(str(job))
    with pytest.raises(ConfigError, match=r"not in .*inner, which is the folder that the cluster receives"):
        command.launch([str(job / "job.yaml"), "address=http://127.0.0.1:1"])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Address of the job server of a cluster that `ray start` started, and the environment of its programs."""
    port, mark = free_port(), str(tmp_path)
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--num-cpus=2", "--disable-usage-stats"]
    options = [f"--port={free_port()}", f"--dashboard-port={port}", "--include-dashboard=true"]
    dashboard = tmp_path / "dashboard"  # its packages alone: others in PEERS have modules of the same names as ours
    dashboard.mkdir()
    for package in {Path(name).parts[0] for name in NEEDED}:
        for found in PEERS.glob(f"{package}*"):
            (dashboard / found.name).symlink_to(found)
    paths = os.pathsep.join([environment()["PYTHONPATH"], os.environ.get("PYTHONPATH", ""), str(dashboard)])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = environment(PYTHONPATH=paths, PATH=path, RAY_AUTH_MODE="token", **{MARK: mark})
    try:
        done = subprocess.run([*start, *options], env=env, capture_output=True, text=True, timeout=START_S)
        assert done.returncode == 0, done.stderr
        yield f"http://127.0.0.1:{port}", env
    finally:
        marked = processes_with(MARK, mark)
        # Ray's agents overwrite their environment with their title
        left = {process for each in marked for process in (each, *each.children(recursive=True))}
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, 10)


@pytest.mark.nightly
@pytest.mark.skipif(not HAS_DASHBOARD, reason=f"Ray's job server needs {', '.join(NEEDED)} in {PEERS}")
def test_a_job_server_runs_the_job_with_a_copy_of_the_folder(job: Path, server: tuple[str, dict[str, str]]) -> None:
    address, env = server
    launch = [sys.executable, "-m", "rlite.cli", "launch", "job.yaml", "name=submitted", f"address={address}"]
    deadline = time.monotonic() + START_S
    while True:
        done = subprocess.run(launch, env=env, capture_output=True, text=True, timeout=START_S)
        if "no Ray job server answers" not in done.stderr or time.monotonic() > deadline:
            break
        time.sleep(1.0)  # the server starts
    assert done.returncode == 0, done.stderr
    assert "start 1" in done.stdout
    assert "job succeeded; restarts of the trainer: 0" in done.stdout
    assert "trainer finished -> the job is done" in done.stdout
