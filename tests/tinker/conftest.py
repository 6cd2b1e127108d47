"""Fixtures of the tests with the real client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import rlite
from tests.tinker.client import client_package, open_sessions
from tests.tinker.serving import Served
from tests.tiny import build_model_dir


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Engines of a tiny model, for servers one after the other."""
    client_package()
    rlite.init(num_devices=1, num_threads=1)
    made = Served(build_model_dir(tmp_path_factory.mktemp("tinker") / "model", "qwen3", hidden=64), max_num_seqs=16)
    yield made
    rlite.shutdown()


@pytest.fixture(autouse=True)
def without_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client tell nobody of itself."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    """Let no client outlive its test: its heartbeat would log for as long as the process lives."""
    yield
    assert open_sessions() == [], "close the ServiceClient: client.close('success').result()"
