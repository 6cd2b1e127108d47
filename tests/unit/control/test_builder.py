"""A job that cannot work is refused while it is built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import ray
from omegaconf import OmegaConf

from rlite.config import load
from rlite.control import RLJobBuilder, RLRoleType
from rlite.control.job import job_of
from rlite.control.spec import JobSpec
from rlite.errors import ConfigError, UnknownOptionError
from tests.unit.control.programs import Actor, Rollout, Trainer, Unfinished


def builder(**changes: Any) -> RLJobBuilder:
    return RLJobBuilder().node_num(1).device_per_node(4).device_type("CPU").config({"lr": 0.5}).trainer(Trainer)


def test_a_job_has_what_its_builder_was_told() -> None:
    job = (
        builder()
        .global_env({"A": 1})
        .actor(Actor).total(4).per_node(4).env({"B": "2"}).resource(CPU=0.5, memory=100).end()
        .rollout("tests.unit.control.programs", "Rollout").total(4).per_node(4).on_failure("workload", 3).end()
        .with_collocation("actor", RLRoleType.ROLLOUT)
        .build()
    )  # fmt: skip
    assert list(job.spec.roles()) == [RLRoleType.ACTOR, RLRoleType.ROLLOUT]
    assert cloudpickle.loads(job.classes.workloads[RLRoleType.ROLLOUT].pickled) is Rollout
    assert job.spec.collocation_of(RLRoleType.ACTOR) == "ACTOR,ROLLOUT"
    assert job.spec.resource_of(RLRoleType.ACTOR) == {"CPU": 0.5, "memory": 100.0}
    assert job.spec.resource_of(RLRoleType.ROLLOUT) == {"CPU": 1}
    assert job.spec.policy(7).roles["ROLLOUT"].on_failure == "workload"
    assert job.spec.policy(7).max_job_restarts == 7


def test_a_class_decorated_by_ray_is_accepted_with_its_options() -> None:
    decorated = ray.remote(runtime_env={"env_vars": {"A": "1"}})(Actor)
    job = builder().actor(decorated).total(1).per_node(1).end().build()
    found = job.classes.workloads[RLRoleType.ACTOR]
    assert cloudpickle.loads(found.pickled) is Actor
    assert found.actor_options["runtime_env"]["env_vars"] == {"A": "1"}
    with pytest.raises(ConfigError, match=r"num_cpus=1.*the job decides.*resource"):
        builder().actor(ray.remote(num_cpus=1)(Actor)).total(1).per_node(1).end().build()


def with_actor(total: int = 1, per_node: int = 1) -> RLJobBuilder:
    return builder().actor(Actor).total(total).per_node(per_node).end()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: builder(), "needs an actor"),
        (lambda: RLJobBuilder().device_per_node(1).actor(Actor).total(1).per_node(1).end(), "needs a trainer"),
        (lambda: builder().actor(Actor).end(), r"actor\.total, actor\.per_node"),
        (lambda: with_actor(0), r"actor\.total=0.*at least 1"),
        (lambda: with_actor().device_type("TPU"), "device_type=TPU.*CPU, GPU"),
        (lambda: with_actor().node_num(0), "node_num=0"),
        (lambda: with_actor().with_collocation("actor", "critc"), "unknown role 'critc'.*'CRITIC'"),
        (lambda: with_actor().with_collocation("actor", "critic"), "CRITIC has no workloads"),
        (lambda: with_actor().with_collocation("actor", "actor"), "ACTOR occurs twice"),
        (lambda: with_actor(3, 3).with_collocation("actor"), r"3 \(ACTOR\) = 3.*multiple of device_per_node=4"),
        (lambda: with_actor(24, 24).with_collocation("actor"), "at most 5 times"),
        (lambda: with_actor(5, 5), "per_node=5.*device_per_node=4"),
        (lambda: with_actor(4, 2), "2 nodes with 2 free devices are needed, and 1 of 1"),
        (lambda: with_actor(4, 4).critic(Rollout).total(1).per_node(1).end(), "CRITIC: 1 nodes with 1 free devices"),
        (lambda: builder().actor("no_such_module", "Actor").total(1).per_node(1).end(), "cannot be imported"),
        (lambda: builder().actor("os.path", "Actr").total(1).per_node(1).end(), "'os.path' has no 'Actr'"),
        (lambda: builder().actor(Trainer).total(1).per_node(1).end(), "Trainer is not a class that extends.*BaseWork"),
        (lambda: with_actor().trainer(Actor), "Actor is not a class that extends.*BaseTrainer"),
        (lambda: with_actor().trainer(Unfinished), "Unfinished does not define fit"),
        (lambda: builder().actor(Actor).total(1).per_node(1).resource(CPU=2).end(), "CPU=2.*one device at most"),
        (lambda: with_actor().config({"lr": object()}), "config:.*object"),
    ],
)
def test_a_job_that_cannot_work_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make().build()


@pytest.mark.parametrize("config", [[1, 2], "lr=1", None, OmegaConf.create([1])])
def test_a_config_that_is_no_mapping_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="config: expected a mapping"):
        builder().config(config)


def test_a_role_twice_and_a_bad_job_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="ACTOR is already in the job"):
        with_actor().actor(Actor)
    for name in ("", "a/b", "../x", "é"):
        with pytest.raises(ConfigError, match="job name"):
            with_actor().build().submit(job_name=name)
    with pytest.raises(ConfigError, match="job_max_restart=-1"):
        with_actor().build().submit(job_max_restart=-1)


SPEC = """
device_per_node: 2
device_type: CPU
trainer: tests.unit.control.programs:Trainer
config: {lr: 1e-3, twice: "${config.lr}"}
actor: {workload: "tests.unit.control.programs:Actor", total: 2, per_node: 2}
rollout: {workload: "tests.unit.control.programs:Rollout", total: 2, per_node: 2, on_failure: role}
collocations: [[actor, rollout]]
"""


def test_a_yaml_spec_is_the_same_job_as_the_builder_makes(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SPEC)
    job = job_of(load(JobSpec, ["--config", str(tmp_path / "job.yaml"), "config.steps=3"]))
    assert job.spec.config == {"lr": 1e-3, "twice": 1e-3, "steps": 3}
    assert cloudpickle.loads(job.classes.trainer) is Trainer
    assert len(job.layout.seats[RLRoleType.ROLLOUT]) == 2
    (tmp_path / "job.yaml").write_text(SPEC.replace("rollout:", "rolout:"))
    with pytest.raises(UnknownOptionError, match="rolout"):
        job_of(load(JobSpec, ["--config", str(tmp_path / "job.yaml")]))


PROGRAM = {"trainer": "rlite.trainer.ppo", "device_per_node": 2, "device_type": "CPU"}


def test_a_trainer_without_a_class_is_a_program_on_devices_of_one_node() -> None:
    job = job_of(JobSpec(**PROGRAM, num_processes=2, config={"actor": {"lr": 1e-3}}))
    assert job.spec.is_program
    assert not job.classes.trainer
    assert job.layout.num_devices == (2,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": "rlite.trainer.poo"}, "no module 'rlite.trainer.poo'"),
        ({"trainer": "no_such_package.ppo"}, "'no_such_package.ppo' cannot be found"),
        ({"num_processes": 3}, "num_processes=3 need a device each, and device_per_node=2"),
        ({"node_num": 2}, "node_num=2: the processes of a program are on one node"),
        ({"actor": {"workload": "a:B", "total": 1, "per_node": 1}}, "actor: .*is a program without workloads"),
        ({"trainer": "a:B", "num_processes": 2}, "num_processes: only for a trainer that is started by module path"),
    ],
)
def test_a_program_that_cannot_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job_of(JobSpec(**{**PROGRAM, **changes}))


def test_importing_the_sdk_loads_neither_torch_nor_ray() -> None:
    program = (
        "import sys, rlite.control as c\n"
        "for name in c.__all__: getattr(c, name)\n"
        "assert not {'torch', 'ray'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
