"""Refusals of the Ray launcher before anything runs."""

from __future__ import annotations

import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

from rlite.errors import ConfigError
from rlite.runtime.cluster.ray import connection
from rlite.runtime.cluster.ray.connection import check_version
from rlite.runtime.cluster.ray.launcher import VISIBILITY, check_visibility
from rlite.trainer.run.interruption import Terminated


def test_a_ray_whose_local_clusters_do_not_authenticate_is_refused() -> None:
    for version in ("2.59.0", "2.60.1", "3.0.0", "2.100.0rc1"):
        check_version(version)
    for version in ("2.58.1", "2.9.3", "1.13.0"):
        with pytest.raises(ConfigError, match=r"do not authenticate.*ray>=2\.59"):
            check_version(version)


def test_a_gpu_worker_that_sees_every_gpu_is_refused() -> None:
    for kind, value in (("cuda", ""), ("cuda", "0"), ("cpu", "1")):
        check_visibility(kind, "n1/cuda:1", {VISIBILITY: value})  # type: ignore[arg-type]
    check_visibility("cuda", "n1/cuda:1", {})
    for value in ("1", "true", "True"):
        with pytest.raises(ConfigError, match=f"n1/cuda:1: {VISIBILITY} is set"):
            check_visibility("cuda", "n1/cuda:1", {VISIBILITY: value})


def test_a_sigterm_while_ray_starts_reaches_the_handler_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        signal.raise_signal(signal.SIGTERM)

    def end(number: int, frame: Any) -> None:
        raise Terminated

    monkeypatch.setattr(ray, "init", init)
    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(Terminated):
            connection.RayConnection("cpu", 1, "local")
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)


def test_programs_that_start_at_once_share_one_token_that_others_cannot_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token = tmp_path / "new" / "auth_token"
    monkeypatch.setattr(connection, "TOKEN", token)
    start = threading.Barrier(8)

    def program(_: int) -> str:
        start.wait(60)
        connection._make_token()
        return token.read_text()

    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(program, range(8)))
    assert {len(text) for text in tokens} == {64}
    assert len(tokens) == 1
    assert token.stat().st_mode & 0o777 == 0o600
    assert list(token.parent.iterdir()) == [token]
