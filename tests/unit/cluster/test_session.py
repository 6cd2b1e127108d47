from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlite.engine.registry import init
from rlite.errors import ConfigError, RliteError, WorkerError
from rlite.runtime.cluster import session as session_module
from rlite.runtime.cluster.launcher import default_cpu_slots
from rlite.runtime.cluster.placement import PlacementRequest
from rlite.runtime.cluster.session import current_session, shutdown


@pytest.fixture(autouse=True)
def no_session_is_left() -> Iterator[None]:
    shutdown()
    yield
    shutdown()


@pytest.mark.parametrize(
    ("environment", "num_devices", "cores", "launcher"),
    [
        ({}, 1, 4, "inprocess"),
        ({}, None, 1, "inprocess"),
        ({}, None, 4, "ray"),
        ({}, 2, 4, "ray"),
        ({"TORCHELASTIC_RUN_ID": "none", "RANK": "0"}, None, 4, "torchrun"),
        ({"RANK": "0"}, 1, 4, "inprocess"),
    ],
)
def test_the_launcher_follows_from_the_surroundings(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], num_devices: int | None, cores: int, launcher: str
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert session_module._default_launcher("cpu", num_devices) == launcher


def test_a_node_has_at_most_eight_cpu_slots_by_default() -> None:
    assert [default_cpu_slots(cores) for cores in (1, 4, 8, 64)] == [1, 4, 8, 8]


def test_a_session_is_one_at_a_time_and_ends_twice_without_harm() -> None:
    with pytest.raises(RliteError, match=r"call rlite\.init\(\) first"):
        current_session()
    started = init(device="cpu", num_devices=1)
    assert current_session() is started
    assert [str(device) for device in started.devices] == ["127.0.0.1/cpu:0"]
    with pytest.raises(ConfigError, match=r"call rlite\.shutdown\(\) first"):
        init(device="cpu", num_devices=1)
    shutdown()
    shutdown()
    init(device="cpu", num_devices=1)


def test_release_returns_devices_once_and_notifies_the_owner_first() -> None:
    session = init(device="cpu", num_devices=1)
    told = []
    name = session.new_name("train")
    assert (name, session.new_name("train"), session.new_name("inference")) == ("train-0", "train-1", "inference-0")
    request = PlacementRequest(owner=name, executor_size=1)
    session.place(request)
    session.before_release(name, lambda: told.append(name))
    session.release(name)
    session.release(name)
    assert told == [name]
    assert session.place(request)


def test_shutdown_releases_everything_though_an_owner_fails() -> None:
    session = init(device="cpu", num_devices=1)
    order = []
    for name in ("first", "second"):
        session.start(name, session.devices, lambda context: object())
        session.before_release(name, lambda name=name: order.append(name))
    session.before_release("second", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        shutdown()
    assert order == ["second", "first"], "of an owner, too, one failure does not keep the others from ending"
    init(device="cpu", num_devices=1)


def test_neighbours_are_the_serving_workers_of_others_on_the_same_devices() -> None:
    session = init(device="cpu", num_devices=1)
    groups = {}
    for name in ("first", "second", "third"):
        placed = session.place(PlacementRequest(owner=name, executor_size=1, colocate_with=tuple(groups)[:1]))
        groups[name] = session.start(name, placed[0], lambda context: object())
    assert session.neighbours("first") == [(groups["second"], 0), (groups["third"], 0)]
    groups["second"].mark_lost([0], WorkerError("it is gone"))
    session.release("third")
    assert session.neighbours("first") == []
    assert session.neighbours("second") == [(groups["first"], 0)]


def test_a_launcher_with_fixed_processes_starts_no_replica() -> None:
    init(device="cpu", num_devices=1)
    session = current_session()
    group = session.launcher.start("owner", session.launcher.devices, lambda context: object())
    with pytest.raises(ConfigError, match="owner: launcher='inprocess' has fixed processes"):
        session.launcher.start_replica(group, 0, group.devices, lambda context: object())
