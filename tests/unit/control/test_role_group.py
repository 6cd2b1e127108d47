"""Role groups over a worker group of this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import cloudpickle
import pytest

from rlite.control.role_group import RoleGroup, UnboundGroup, hold_port, role_groups
from rlite.control.spec import RLRoleType
from rlite.control.workers import BaseWorkload, make_workload
from rlite.data.dispatch import NeedParallel
from rlite.errors import CallTimeout, ConfigError, RliteError, WorkerDied
from rlite.runtime.cluster.group import WorkerGroup
from rlite.runtime.cluster.host import WorkerContext, WorkerHost
from rlite.runtime.cluster.placement import Device
from tests.unit.control.programs import Actor, Trainer
from tests.unit.control.threads import ThreadHandle

CONFIG = {"lr": 0.5}


@pytest.fixture
def group() -> Iterator[WorkerGroup]:
    devices = [Device("local", index) for index in range(3)]
    group = WorkerGroup("ACTOR", devices, [ThreadHandle() for _ in devices], 10.0)
    group.replica_size = 1
    ranks = tuple((rank, 3) for rank in range(3))
    place = ("127.0.0.1", 1234), "ACTOR,ROLLOUT"
    factory = partial(make_workload, cloudpickle.dumps(Actor), RLRoleType.ACTOR, CONFIG, "master", ranks, *place)
    contexts = [WorkerContext(rank, 3, device, "cpu", 0, (0, 1, 2)) for rank, device in enumerate(group.devices)]
    group.create(factory, contexts, 10.0)
    yield group
    group.stop()


def role_group(group: WorkerGroup, late: list[Any] | None = None) -> RoleGroup:
    noted: list[Any] = [] if late is None else late
    return RoleGroup(RLRoleType.ACTOR, Actor, group, lambda *report: noted.append(report))


def test_lists_with_an_item_per_workload_are_split_and_other_arguments_copied(group: WorkerGroup) -> None:
    actors = role_group(group)
    assert actors.update([1, 2, 3]) == [1, 2, 3]
    assert actors.update([1, 2]) == [[1, 2]] * 3
    assert actors.update(NeedParallel(list("abcde"))) == [["a", "b"], ["c", "d"], ["e"]]
    assert actors.add_one(-5) == 3
    assert actors.save("x") == "x 0"
    assert len(actors) == 3


def test_a_method_that_the_class_lacks_fails_locally(group: WorkerGroup) -> None:
    with pytest.raises(AttributeError, match=r"no method 'updat'; did you mean 'update'"):
        role_group(group).updat(1)
    with pytest.raises(ConfigError, match="later is async"):
        role_group(group).later()
    assert not hasattr(role_group(group), "_private")


def test_a_late_workload_is_named_and_reported(group: WorkerGroup) -> None:
    class Slow(Actor):
        from rlite.control.role_group import trainer_invocation

        @trainer_invocation(is_async=True, timeout=0.2)
        def wait(self) -> None: ...

    for rank in range(3):
        group.handles[rank].submit(WorkerHost.put, group.key(rank), SleepAtRankOne(rank))  # type: ignore[arg-type]
    late: list[Any] = []
    actors = RoleGroup(RLRoleType.ACTOR, Slow, group, lambda *report: late.append(report))
    with pytest.raises(CallTimeout, match="ACTOR rank 1"):
        actors.wait()
    assert late == [(RLRoleType.ACTOR, [1], "wait", 0.2)]


class SleepAtRankOne:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def wait(self) -> None:
        time.sleep(1.0 if self._rank == 1 else 0.0)


def test_a_dead_workload_raises_and_a_renewed_group_serves(group: WorkerGroup) -> None:
    actors = role_group(group)
    group.handles[1].end()  # type: ignore[attr-defined]
    with pytest.raises(WorkerDied, match=r"ACTOR\.update: no result, workloads ended: ACTOR rank 1"):
        actors.update(1)
    with pytest.raises(CallTimeout, match="not all of its workloads"):
        actors.wait_until_whole(0.05)
    with pytest.raises(WorkerDied):
        actors.update(1)


def test_a_workload_knows_its_place_in_its_constructor(group: WorkerGroup) -> None:
    actor = group.handles[1].host.only_worker()  # type: ignore[attr-defined]
    assert (actor.name, str(actor.role), actor.rank, actor.world_size, actor.word_size) == ("ACTOR-1", "ACTOR", 1, 3, 3)
    assert (actor.local_rank, actor.local_world_size) == (1, 3)
    assert (actor.torch_master_addr, actor.torch_master_port) == ("127.0.0.1", 1234)
    assert actor.is_actor_role()
    assert not actor.is_critic_role()
    assert actor.get_device_collocation() == "ACTOR,ROLLOUT"
    assert (actor.config.lr, actor.master_handle) == (0.5, "master")
    with pytest.raises(RliteError, match="a job makes workloads"):
        BaseWorkload(None, None).rank  # noqa: B018


def test_role_groups_are_not_there_in_the_constructor_of_a_trainer(group: WorkerGroup) -> None:
    class Early(Trainer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.RG_ACTOR.update(1)

    handles: dict[RLRoleType, list[Any]] = {RLRoleType.ACTOR: ["a", "b"]}
    with pytest.raises(UnboundGroup, match=r"RG_ACTOR.*__init__.*init\(\)"):
        Early(handles, {}, None)
    trainer = Trainer(handles, {}, None)  # type: ignore[arg-type]
    trainer._groups = role_groups([role_group(group)])
    trainer._resources = {RLRoleType.ACTOR: {"CPU": 1}}
    assert trainer.RG_ACTOR.update(1) == [1, 1, 1]
    with pytest.raises(UnboundGroup, match=r"RG_CRITIC.*has RG_ACTOR"):
        trainer.RG_CRITIC.update(1)
    with pytest.raises(AttributeError, match="no attribute 'lr'"):
        trainer.lr  # noqa: B018
    assert trainer.get_role_groups() == ["RG_ACTOR"]
    assert (trainer.actors, trainer.critics) == (["a", "b"], [])
    trainer.get_workload_resource("actor")["CPU"] = 5
    assert trainer.get_workload_resource(RLRoleType.ACTOR) == {"CPU": 1}
    with pytest.raises(ConfigError, match="unknown role 'acter'"):
        trainer.get_workload_resource("acter")


def test_held_port_is_reserved_and_can_be_served() -> None:
    import socket

    port = hold_port("127.0.0.1")
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
