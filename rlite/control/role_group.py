"""`RoleGroup`: calls on all workloads of a role, through the worker groups and the dispatch of the engines."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from rlite.cluster.group import WorkerGroup
from rlite.control.invocation import Invocation, invocation_of
from rlite.control.roles import RLRoleType
from rlite.dispatch import deal
from rlite.errors import CallTimeout, ConfigError, RliteError, WorkerDied, did_you_mean

LateReport = Callable[[RLRoleType, list[int], str, float], None]
"""takes role, ranks, method and time-out of a call that was not answered in its declared time"""


class RoleGroup:
    """Workloads of one role. Each public method of their class is a method of the group."""

    def __init__(self, role: RLRoleType, cls: type, group: WorkerGroup, on_late: LateReport) -> None:
        """Group workloads.

        Args:
            role: their role.
            cls: their class.
            group: their processes.
            on_late: called before CallTimeout is raised.
        """
        self._role = role
        self._cls = cls
        self._group = group
        self._on_late = on_late
        self._is_whole = threading.Event()
        self._is_whole.set()

    def __len__(self) -> int:
        return len(self._group)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = None if name.startswith("_") else getattr(self._cls, name, None)
        if not callable(function):
            methods = [
                each for each in dir(self._cls) if not each.startswith("_") and callable(getattr(self._cls, each))
            ]
            raise AttributeError(
                f"{self._cls.__name__} ({self._role}) has no method {name!r}; {did_you_mean(name, methods)}"
            )
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"{self._cls.__name__}.{name} is async; a workload's methods are synchronous")
        return partial(self._invoke, name, invocation_of(function))

    def wait_until_whole(self, timeout: float) -> None:
        """Wait until all workloads serve again, after a call raised WorkerDied.

        Raises:
            CallTimeout: a workload is still missing after `timeout` seconds.
        """
        if not self._is_whole.wait(timeout):
            raise CallTimeout(f"{self._role}: not all of its workloads serve again after {timeout:g} s")

    def _renew(self, group: WorkerGroup) -> None:
        """Call the workloads of another group from now on."""
        self._group = group
        self._is_whole.set()

    def _invoke(self, name: str, how: Invocation, *args: Any, **kwargs: Any) -> Any:
        group = self._group
        if how.pre_func is not None:
            made = how.pre_func(*args, **kwargs)
            args, kwargs = made if isinstance(made, tuple) else (made,), {}
        ranks = [0] if how.target == "RANK0" else list(range(len(group)))
        calls = deal(args, kwargs, len(ranks), how.auto_shard)
        if how.blocking:
            results = self._wait(group, name, calls, ranks, how)
        else:
            group.check(ranks)
            with group.order:
                actors = [group.handles[rank].actor for rank in ranks]  # type: ignore[attr-defined]
                results = [
                    getattr(actor, name).remote(*call[0], **call[1]) for actor, call in zip(actors, calls, strict=True)
                ]
        answer = results[0] if how.target == "RANK0" else results
        return answer if how.post_func is None else how.post_func(answer)

    def _wait(self, group: WorkerGroup, name: str, calls: Any, ranks: list[int], how: Invocation) -> list[Any]:
        timeout = how.timeout if how.is_async else None
        try:
            return group.call(name, calls, ranks, timeout, f"{self._role}.{name}")
        except WorkerDied as error:
            if group is self._group:
                self._is_whole.clear()
            raise WorkerDied(
                f"{self._role}.{name}: no result, workloads ended: {'; '.join(error.workers)}. The job's policy "
                "decides what happens. To go on without this call, catch WorkerDied and call wait_until_whole().",
                error.workers,
            ) from None
        except CallTimeout as error:
            if how.is_async:
                late = [rank for rank in ranks if group.describe(rank) in error.late]
                self._on_late(self._role, late, name, how.timeout)
            raise


def role_groups(groups: Iterable[RoleGroup]) -> dict[str, RoleGroup]:
    """Return groups by their name on a trainer."""
    return {group._role.group: group for group in groups}


class UnboundGroup(RliteError, AttributeError):
    """A role group was used before it exists, or belongs to a role that the job does not have."""
