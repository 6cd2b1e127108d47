"""A replica that cannot go back to the adapter before is taken out of service, and replaced within the budget."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlite.errors import WeightSyncError, WorkerError
from tests.adapters import drawn
from tests.integration.test_elastic_replicas import until
from tests.integration.test_failed_adapter_syncs import Served
from tests.integration.worlds import ray_session

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(2):
        yield


@pytest.mark.parametrize("name", ["a", None])
def test_a_replica_that_cannot_go_back_is_replaced(
    engines: list[Any], models: dict[str, Path], tmp_path: Path, name: str | None
) -> None:
    served = Served(engines, models["qwen2"], tmp_path / "plan", name)
    served.sync(0)
    before = served.values()
    with pytest.raises(WeightSyncError, match=r"still serves version 1: .*use_adapter fails as planned"):
        served.sync(1, "use_adapter", "use_adapter")
    assert [lost.replica for lost in served.engine.lost_replicas] == [1]
    until(lambda: len(served.engine.replaced_replicas) == 1)
    assert (served.values(), served.versions()) == (before, {1})
    assert served.sync(1) == 2
    assert (served.values() != before, served.versions()) == (True, {2})


def test_without_a_budget_the_other_replicas_serve_on(
    engines: list[Any], models: dict[str, Path], tmp_path: Path
) -> None:
    served = Served(engines, models["qwen2"], tmp_path / "plan", None, max_replacements=0)
    served.sync(0)
    before = served.values()
    with pytest.raises(WeightSyncError, match=r"still serves version 1: .*set_version fails as planned"):
        served.sync(1, "set_version", "set_version")
    assert served.engine.num_replicas == 1
    assert (served.values(), served.versions()) == (before[:1], {1})
    with pytest.raises(WorkerError, match="could not be changed back on replica 1") as caught:
        served.sync(1)
    assert "still serves version 1" in caught.value.__notes__[0]


def test_a_replica_that_does_not_forget_an_adapter_is_replaced(
    engines: list[Any], models: dict[str, Path], tmp_path: Path
) -> None:
    served = Served(engines, models["qwen2"], tmp_path / "plan", None)
    base = served.values()
    served.sync(0)
    served.plan.write_text("drop_adapter")
    served.engine.remove_adapter(None)
    until(lambda: len(served.engine.replaced_replicas) == 1)
    assert (served.values(), served.versions()) == (base, {2})


def test_a_worker_that_dies_amid_a_sync_is_replaced_with_the_new_version(
    engines: list[Any], models: dict[str, Path], tmp_path: Path
) -> None:
    served = Served(engines, models["qwen2"], tmp_path / "plan", "a")
    served.sync(0)
    assert served.sync(1, "death") == 2
    until(lambda: len(served.engine.replaced_replicas) == 1)
    assert len(served.values()) == 2
    assert served.versions() == {2}


def test_a_replica_that_joins_amid_a_sync_serves_its_version(
    engines: list[Any], models: dict[str, Path], tmp_path: Path
) -> None:
    served = Served(engines, models["qwen2"], tmp_path / "plan", "a", num=1)
    served.sync(0)
    served.plan.write_text("wait")
    joining = threading.Thread(target=served.engine.scale, args=(2,))
    joining.start()
    until(lambda: "waits" in served.plan.read_text())  # its worker has begun, with the adapters of before
    served.engine.take_adapter("a", drawn(1, 64), "a test")
    served.plan.write_text("")
    joining.join()
    assert len(served.values()) == 2
    assert served.versions() == {2}
