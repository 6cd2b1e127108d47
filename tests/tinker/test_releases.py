"""`rlite tinker` as a command, with releases of the client in processes of their own: `make test-tinker`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.tinker.client import FOLDER, NEWEST, client_package
from tests.tinker.commands import TOKEN, environment, free_port, of_client, server
from tests.tiny import build_model_dir

pytestmark = pytest.mark.nightly
RELEASES = ("0.25.0", "0.30.0", "0.34.0", "0.38.0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    client_package()
    return build_model_dir(tmp_path_factory.mktemp("model") / "model", "qwen3", hidden=64)


def program(release: str, model: Path, port: int, steps: int = 3, begin: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("loop.py")), str(model), str(steps), str(begin)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env=environment(release, **of_client(port)), **pipes)
    return process


def at_the_last_step(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert any("waiting" in line for line in process.stdout), "it has ended"


def end(process: subprocess.Popen[str]) -> Any:
    out, _ = process.communicate("go\n", timeout=200)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


def ends(processes: Sequence[subprocess.Popen[str]]) -> list[Any]:
    return [end(process) for process in processes]


def test_all_releases_learn_the_same_and_a_killed_server_changes_nothing(model: Path, tmp_path: Path) -> None:
    port = free_port()
    with server(model, tmp_path / "state", port) as process:
        installed = [release for release in RELEASES if (FOLDER / release).is_dir()]
        found = ends([program(release, model, port) for release in installed])
        assert found == [found[0]] * len(found)
        asks = program(NEWEST, model, port)
        at_the_last_step(asks)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with server(model, tmp_path / "state", port):
        assert end(asks) == found[0]


def test_fifty_clients_at_once_equal_each_alone(model: Path, tmp_path: Path) -> None:
    tinker = client_package()
    types, port = tinker.types, free_port()
    from tests.tinker.client import counting

    url = f"http://127.0.0.1:{port}"
    with server(model, tmp_path / "state", port), ExitStack() as opened:
        services = [opened.enter_context(tinker.ServiceClient(base_url=url, api_key=TOKEN)) for _ in range(50)]
        made = [service.create_lora_training_client(str(model), rank=2, seed=1) for service in services]
        clients = [future.result() for future in made]
        forward = [client.forward_backward(counting(2), "cross_entropy") for client in clients]
        steps = [client.optim_step(types.AdamParams(learning_rate=1e-2)) for client in clients]
        assert len({future.result().metrics["loss:sum"] for future in forward}) == 1
        assert len({future.result().metrics["grad_norm:mean"] for future in steps}) == 1
        after = [client.forward(counting(2), "cross_entropy") for client in clients]
        assert len({future.result().metrics["loss:sum"] for future in after}) == 1
