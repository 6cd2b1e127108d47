"""`BaseTrainer`: the user's program of a job, in a process of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from rlite.control.role_group import RoleGroup, UnboundGroup
from rlite.control.roles import RLRoleType


class BaseTrainer(ABC):
    """Program that calls the workloads. A subclass defines `init` and `fit`, and only sets attributes in `__init__`.

    `self.RG_ACTOR`, `RG_ROLLOUT`, `RG_REWARD`, `RG_REFERENCE` and `RG_CRITIC` are the groups of the roles that the job
    has. They exist in `init` and `fit`.
    """

    _groups: Mapping[str, RoleGroup] | None = None
    _resources: Mapping[RLRoleType, Mapping[str, float]] = {}

    def __init__(
        self,
        actor_handles: dict[RLRoleType, list[Any]],
        actor_classes: dict[RLRoleType, type],
        config: DictConfig,
    ) -> None:
        """Keep the arguments.

        Args:
            actor_handles: Ray actor handles of the workloads, by role, in rank order.
            actor_classes: classes of the workloads, by role.
            config: the job's configuration.
        """
        self._actor_handles = actor_handles
        self._actor_classes = actor_classes
        self._config = config

    @abstractmethod
    def init(self) -> None:
        """Prepare the training. It runs again after each restart."""

    @abstractmethod
    def fit(self) -> None:
        """Train. It runs again after each restart, so it resumes from its own stored state."""

    def is_recoverable(self) -> bool:
        """Return True if `init` and `fit` may run again beside the same workloads when the trainer's process ended."""
        return False

    @property
    def config(self) -> DictConfig:
        """Configuration of the job."""
        return self._config

    @property
    def actor_handles(self) -> dict[RLRoleType, list[Any]]:
        """Ray actor handles of all workloads, by role, in rank order."""
        return self._actor_handles

    @property
    def actor_classes(self) -> dict[RLRoleType, type]:
        """Classes of the workloads, by role."""
        return self._actor_classes

    @property
    def actors(self) -> list[Any]:
        """Ray actor handles of the actors."""
        return self._handles(RLRoleType.ACTOR)

    @property
    def references(self) -> list[Any]:
        """Ray actor handles of the reference workloads."""
        return self._handles(RLRoleType.REFERENCE)

    @property
    def rollouts(self) -> list[Any]:
        """Ray actor handles of the rollout workloads."""
        return self._handles(RLRoleType.ROLLOUT)

    @property
    def rewards(self) -> list[Any]:
        """Ray actor handles of the reward workloads."""
        return self._handles(RLRoleType.REWARD)

    @property
    def critics(self) -> list[Any]:
        """Ray actor handles of the critics."""
        return self._handles(RLRoleType.CRITIC)

    def get_role_groups(self) -> list[str]:
        """Return the names of the job's role groups."""
        return [role.group for role in RLRoleType if role in self._actor_handles]

    def get_workload_resource(self, role: RLRoleType | str) -> dict[str, float]:
        """Return the Ray resources of one workload of a role, as a copy. A role that the job lacks has none."""
        return dict(self._resources.get(RLRoleType.of(role), {}))

    def _handles(self, role: RLRoleType) -> list[Any]:
        return self._actor_handles.get(role, [])

    def __getattr__(self, name: str) -> RoleGroup:
        if not name.startswith("RG_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self._groups is None:
            raise UnboundGroup(
                f"{name} does not exist in __init__, which only sets attributes; use it in init() or fit()"
            )
        if name not in self._groups:
            raise UnboundGroup(f"{name}: the job has no such role; it has {', '.join(self._groups)}")
        return self._groups[name]
