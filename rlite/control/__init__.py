"""The control plane: a trainer, workloads by role, and a master that keeps them alive, on Ray.

    job = RLJobBuilder().node_num(1).device_per_node(4).config({...}).trainer(MyTrainer)
    job = job.actor(MyActor).total(4).per_node(4).end().build()
    result = job.submit(job_name="run-1")

Importing this package imports neither torch nor ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlite import imports

if TYPE_CHECKING:
    from rlite.control.job import JobHandle, JobResult, RLJob, RLJobBuilder
    from rlite.control.role_group import RoleGroup, trainer_invocation
    from rlite.control.spec import JobSpec, RLRoleType, RoleSpec
    from rlite.control.workers import BaseTrainer, BaseWorkload

__all__, __getattr__, __dir__ = imports.exports(
    __name__,
    {
        "rlite.control.job": "JobHandle JobResult RLJob RLJobBuilder",
        "rlite.control.role_group": "RoleGroup trainer_invocation",
        "rlite.control.spec": "JobSpec RLRoleType RoleSpec",
        "rlite.control.workers": "BaseTrainer BaseWorkload",
    },
)
