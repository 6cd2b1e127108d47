"""`RLJobBuilder`: a job in a chain of calls. Every mistake is an error at `build`, before a process starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import cloudpickle
from omegaconf import DictConfig, OmegaConf

from rlite.control.job import RLJob, label_of, trainer_class, workload_class
from rlite.control.plan import JobClasses
from rlite.control.spec import JobSpec, RLRoleType
from rlite.errors import ConfigError


class RoleBuilder:
    """Options of one role. `end()` returns to the job."""

    def __init__(self, job: RLJobBuilder, values: dict[str, Any]) -> None:
        self._job = job
        self._values = values

    def total(self, total: int) -> RoleBuilder:
        """Set the number of workloads."""
        return self._with("total", total)

    def per_node(self, per_node: int) -> RoleBuilder:
        """Set the number of workloads on one node."""
        return self._with("per_node", per_node)

    def env(self, env: Mapping[str, Any]) -> RoleBuilder:
        """Set environment variables of the workloads."""
        return self._with("env", dict(env))

    def resource(self, resource: Mapping[str, float] | None = None, **more: float) -> RoleBuilder:
        """Set the Ray resources of one workload: `resource(GPU=0.5)` or `resource({"GPU": 0.5})`."""
        given = {**(resource or {}), **more}
        return self._with("resource", {name: float(amount) for name, amount in given.items()})

    def on_failure(
        self, level: Literal["ignore", "workload", "role", "job"], max_restarts: int | None = None
    ) -> RoleBuilder:
        """Set the failure scope and restart limit."""
        if max_restarts is not None:
            self._with("max_restarts", max_restarts)
        return self._with("on_failure", level)

    def end(self) -> RLJobBuilder:
        """Return to the job."""
        return self._job

    def _with(self, name: str, value: Any) -> RoleBuilder:
        self._values[name] = value
        return self


class RLJobBuilder:
    """A job, built step by step. An actor and a trainer are mandatory."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._trainer: Any = None
        self._roles: dict[RLRoleType, dict[str, Any]] = {}
        self._classes: dict[RLRoleType, Any] = {}
        self._collocations: list[list[str]] = []

    def node_num(self, num: int) -> RLJobBuilder:
        """Set the number of nodes."""
        return self._with("node_num", num)

    def device_per_node(self, num: int) -> RLJobBuilder:
        """Set the number of devices on each node."""
        return self._with("device_per_node", num)

    def device_type(self, kind: str) -> RLJobBuilder:
        """Set the kind of the devices: "CPU" or "GPU"."""
        return self._with("device_type", str(kind).upper())

    def config(self, config: Mapping[str, Any] | DictConfig) -> RLJobBuilder:
        """Set the configuration of the trainer and the workloads.

        Raises:
            ConfigError: it is not a mapping.
        """
        if isinstance(config, DictConfig):
            config = OmegaConf.to_container(config)  # type: ignore[assignment]
        if not isinstance(config, Mapping):
            raise ConfigError(f"config: expected a mapping, found a {type(config).__name__}")
        return self._with("config", dict(config))

    def global_env(self, env: Mapping[str, Any]) -> RLJobBuilder:
        """Set environment variables of the trainer and all workloads."""
        return self._with("global_env", dict(env))

    def options(self, **options: Any) -> RLJobBuilder:
        """Set further options of `JobSpec`, such as `start_timeout`."""
        self._values.update(options)
        return self

    def trainer(self, trainer: Any, class_name: str | None = None) -> RLJobBuilder:
        """Set the trainer: a class, or a module and the name of a class."""
        self._trainer = _given(trainer, class_name)
        return self

    def actor(self, workload: Any, class_name: str | None = None) -> RoleBuilder:
        """Add the actor: a class (plain or @ray.remote), or a module and the name of a class."""
        return self._role(RLRoleType.ACTOR, workload, class_name)

    def rollout(self, workload: Any, class_name: str | None = None) -> RoleBuilder:
        """Add the rollout role."""
        return self._role(RLRoleType.ROLLOUT, workload, class_name)

    def reward(self, workload: Any, class_name: str | None = None) -> RoleBuilder:
        """Add the reward role."""
        return self._role(RLRoleType.REWARD, workload, class_name)

    def reference(self, workload: Any, class_name: str | None = None) -> RoleBuilder:
        """Add the reference role."""
        return self._role(RLRoleType.REFERENCE, workload, class_name)

    def critic(self, workload: Any, class_name: str | None = None) -> RoleBuilder:
        """Add the critic."""
        return self._role(RLRoleType.CRITIC, workload, class_name)

    def with_collocation(self, *roles: str | RLRoleType) -> RLJobBuilder:
        """Let roles share devices."""
        self._collocations.append([RLRoleType.of(role).lower() for role in roles])
        return self

    def with_collocation_all(self) -> RLJobBuilder:
        """Let all roles share devices."""
        self._collocations = [[role.lower() for role in RLRoleType if role in self._roles]]
        return self

    def build(self) -> RLJob:
        """Return the job.

        Raises:
            ConfigError: something is missing or wrong.
        """
        if self._trainer is None:
            raise ConfigError("a job needs a trainer: .trainer(MyTrainer)")
        if RLRoleType.ACTOR not in self._roles:
            raise ConfigError("a job needs an actor: .actor(MyActor).total(N).per_node(N).end()")
        workloads = {role: workload_class(role, self._classes[role]) for role in self._roles}
        trainer = trainer_class(self._trainer)
        roles = {role.lower(): {"workload": workloads[role].label, **values} for role, values in self._roles.items()}
        rest = {"trainer": label_of(trainer), "collocations": self._collocations}
        spec = JobSpec(**{**self._values, **roles, **rest})
        return RLJob(spec, JobClasses(cloudpickle.dumps(trainer), workloads))

    def _role(self, role: RLRoleType, workload: Any, class_name: str | None) -> RoleBuilder:
        if role in self._roles:
            raise ConfigError(f"{role} is already in the job")
        self._classes[role] = _given(workload, class_name)
        self._roles[role] = {}
        return RoleBuilder(self, self._roles[role])

    def _with(self, name: str, value: Any) -> RLJobBuilder:
        self._values[name] = value
        return self


def _given(given: Any, class_name: str | None) -> Any:
    return given if class_name is None else f"{given}:{class_name}"
