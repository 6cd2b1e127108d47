"""Roles of workloads."""

from __future__ import annotations

from enum import StrEnum

from rlite.errors import ConfigError, did_you_mean


class RLRoleType(StrEnum):
    """Purpose of a workload in reinforcement learning."""

    ACTOR = "ACTOR"
    ROLLOUT = "ROLLOUT"
    REWARD = "REWARD"
    REFERENCE = "REFERENCE"
    CRITIC = "CRITIC"

    @property
    def group(self) -> str:
        """Name of the role's group on a trainer: "RG_ACTOR"."""
        return f"RG_{self.value}"

    @classmethod
    def of(cls, given: RLRoleType | str) -> RLRoleType:
        """Return the role of a name, in any case.

        Raises:
            ConfigError: there is no such role.
        """
        try:
            return cls(str(given).upper())
        except ValueError:
            raise ConfigError(f"unknown role {given!r}; {did_you_mean(str(given).upper(), cls)}") from None
