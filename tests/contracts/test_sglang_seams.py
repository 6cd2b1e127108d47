"""The declared methods and the actor program with executor="sglang", over a server that keeps SGLang's contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts import sglang_wheel as wheel
from tests.contracts import test_actor_program as program
from tests.contracts import test_declared_methods as methods
from tests.contracts.test_sglang import installed  # noqa: F401  # an autouse fixture
from tests.integration.worlds import world
from tests.tiny import build_model_dir

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not wheel.IS_HERE, reason=wheel.REASON)]


@pytest.fixture
def two_devices() -> Iterator[None]:
    with world(2):
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return build_model_dir(tmp_path / "qwen2", "qwen2", hidden=64)


def test_a_whole_life_calls_declared_methods_alone(tmp_path: Path) -> None:
    methods.test_a_whole_life_calls_declared_methods_alone("sglang", tmp_path)


@pytest.mark.nightly
def test_an_actor_learns_on_rollouts(two_devices: None, path: Path) -> None:
    program.test_an_actor_learns_on_rollouts_of_every_executor("sglang", path)


def test_a_replica_of_two_workers_chooses_who_is_asked_and_who_answers(two_devices: None, path: Path) -> None:
    program.test_a_replica_of_two_workers_chooses_who_is_asked_and_who_answers("sglang", path)
