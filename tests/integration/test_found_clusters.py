"""A cluster that `ray start` left on the machine: joined if it takes this program, and passed over if it does not."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests import forked_python
from tests.integration.worlds import MARK, environment, free_port, processes_with

pytestmark = pytest.mark.slow
START_S = 120.0
TOKEN = "0123456789abcdef" * 4
PROGRAM = """
import rlite
rlite.init(device="cpu", num_devices=1, launcher="ray")
import ray
print("joined", ray.get_runtime_context().gcs_address)
rlite.shutdown()
"""
COMMAND = """
from rlite.control import command
command.status(["my-run"])
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """Address of a cluster that asks for TOKEN, and the environment of another user who finds it."""
    home, folder = tmp_path_factory.mktemp("home"), tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    env = environment(HOME=str(home), RAY_TMPDIR=folder, **{MARK: str(home)})
    env.pop("RAY_AUTH_MODE", None)  # a Ray that an earlier test started has set it
    options = ["--head", "--num-cpus=1", "--disable-usage-stats", "--include-dashboard=false", f"--port={free_port()}"]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
    path = f"{Path(sys.executable).parent}:{env['PATH']}"
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "PATH": path}
    try:
        done = subprocess.run(start, env={**env, **secret}, capture_output=True, text=True, timeout=START_S)
        assert done.returncode == 0, done.stderr
        yield Path(folder, "ray/ray_current_cluster").read_text().strip(), env
    finally:
        marked = processes_with(MARK, str(home))
        for process in {process for each in marked for process in (each, *each.children(recursive=True))}:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def run(env: dict[str, str], program: str = PROGRAM, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [forked_python.python(), "-c", program]
    return subprocess.run(command, env={**env, **changes}, capture_output=True, text=True, timeout=START_S)


def passed_over(address: str, why: str) -> str:
    return f"the Ray cluster that `ray start` left here at {address} is not used: {why}"


@pytest.mark.nightly
def test_a_cluster_that_refuses_this_program_is_passed_over_with_a_warning(cluster: tuple[str, dict[str, str]]) -> None:
    address, env = cluster
    done = run(env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("joined ")
    assert address not in done.stdout
    assert passed_over(address, "AuthenticationError") in done.stderr


def test_the_commands_pass_it_over_and_say_that_none_runs(cluster: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    address, env = cluster
    done = run(env, COMMAND, RAY_AUTH_MODE="token", HOME=str(tmp_path))  # without the token of an earlier Ray
    assert passed_over(address, "RAY_AUTH_MODE=token, and there is no token") in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "rlite.errors.ConfigError: no Ray cluster runs here: give its address="
    )


def test_a_cluster_that_was_asked_for_and_refuses_is_an_error(cluster: tuple[str, dict[str, str]]) -> None:
    address, env = cluster
    done = run(env, RAY_ADDRESS=address)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("rlite.errors.ConfigError")]
    assert f"no Ray cluster answers at address='{address}': AuthenticationError: RPC error: InvalidAuthToken" in line


@pytest.mark.parametrize("mode", [{}, {"RAY_AUTH_MODE": "token"}])
def test_a_cluster_that_takes_the_token_of_this_user_is_joined(
    cluster: tuple[str, dict[str, str]], mode: dict[str, str]
) -> None:
    address, env = cluster
    done = run(env, RAY_AUTH_TOKEN=TOKEN, **mode)
    assert done.stdout == f"joined {address}\n", done.stderr


def test_a_ray_that_does_not_start_is_one_line(cluster: tuple[str, dict[str, str]]) -> None:
    done = run(cluster[1], RAY_TMPDIR=f"/tmp/{'long' * 40}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("rlite.errors.WorkerError: Ray did not start on this machine: ")
