"""Worker processes as Ray actors, and their handles. This module imports no torch, so that an actor starts quickly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import cloudpickle
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError

from rlite.errors import ConfigError, SnapshotLost, WorkerDied, WorkerError
from rlite.runtime.cluster.group import AbsentHandle
from rlite.runtime.cluster.guard import TerminationNotice, end_at_sigterm
from rlite.runtime.cluster.host import CallPosition, Outcome, WorkerHost, WorkerKey
from rlite.runtime.cluster.launcher import Interface
from rlite.runtime.cluster.ray.connection import ControlService

STOP_TIMEOUT_S = 10.0
GROUPS = {"pulse": 1, "notice": 1, "look": 1, "aside": 4}
"""threads beside the thread that serves calls in order"""
KEPT_OPTIONS = ("concurrency_groups", "runtime_env")
"""options of `@ray.remote(...)` that a workload may set; the job decides all others"""


class RayHost:
    """A worker process: a `WorkerHost` whose ordered calls run one at a time.

    `host_pulse` never returns, so its end signals the death of the process.
    """

    def __init__(self, key: WorkerKey | None = None, factory: bytes = b"", grace_s: float = 0.0) -> None:
        """Serve calls.

        `key`: worker to make at once, for an actor that Ray restarts; None: a call makes it. `grace_s`: seconds for
        which the process goes on after SIGTERM.
        """
        self._host = WorkerHost()
        self._notice = TerminationNotice(grace_s) if grace_s else None
        if self._notice is None:
            end_at_sigterm()  # Ray's own handler waits for all calls to return, and `host_pulse` does not
        if key is not None:
            self._host.put(key, cloudpickle.loads(factory)())

    @ray.method(concurrency_group="pulse")
    def host_pulse(self) -> None:
        """Block forever."""
        threading.Event().wait()

    @ray.method(concurrency_group="notice")
    def host_notice(self) -> None:
        """Block until the process is asked to end, for a host with a grace period."""
        assert self._notice is not None
        self._notice.is_given.wait()

    @ray.method(concurrency_group="look")
    def host_look(self, with_stack: bool = False) -> CallPosition:
        """Return the position of the call under way, in a concurrency group of its own."""
        return replace(self._host.look(with_stack), node=ray.get_runtime_context().get_node_id())

    @ray.method(concurrency_group="aside")
    def host_aside(self, key: WorkerKey, method: str, args: tuple, kwargs: dict) -> Outcome:
        """Call a method of a worker beside the ordered calls; see `WorkerHost.aside`."""
        return self._host.aside(key, method, args, kwargs)

    def host_serve(self, method: str, *args: Any) -> Outcome:
        """Call a method of the `WorkerHost`, in the order of submission."""
        if method == WorkerHost.call.__name__:  # as for a task of Ray, arguments may be references
            key, name, given, named = args
            args = (key, name, tuple(map(_fetched, given)), {each: _fetched(value) for each, value in named.items()})
        return getattr(self._host, method)(*args)

    def host_keep(self, key: WorkerKey, method: str) -> tuple[Outcome, Any]:
        """Call a worker's method in order.

        Returns the outcome without its value, and the value.
        """
        outcome = self._host.call(key, method, (), {})
        return replace(outcome, value=None), outcome.value


HOST_OPTIONS: dict[str, Any] = {"max_restarts": 0, "num_cpus": 0, "concurrency_groups": GROUPS}
HostActor = ray.remote(**HOST_OPTIONS)(RayHost)


def plain_class(given: Any) -> tuple[type, dict[str, Any]]:
    """Return the class under `@ray.remote` and the options that the decorator set."""
    cls = given.__ray_metadata__.modified_class.__ray_actor_class__
    options = {name: value for name, value in given._default_options.items() if value is not None}
    if taken := sorted(options.keys() - set(KEPT_OPTIONS)):
        raise ConfigError(
            f"{cls.__name__}: @ray.remote({taken[0]}={options[taken[0]]!r}): the job decides about resources and "
            f"restarts. Remove it, and use .resource(...) or .on_failure(...) in the job. Accepted: "
            f"{', '.join(KEPT_OPTIONS)}"
        )
    return cls, options


def hosting(interface: Interface, options: Mapping[str, Any]) -> Any:
    """Return an actor class of hosts whose actors also have the methods of an interface, for plain Ray calls."""
    if taken := sorted(interface.methods.keys() & vars(RayHost).keys()):
        raise ConfigError(f"{interface.name}.{taken[0]}: rlite's hosts use this name; rename the method")
    methods = {name: _forward(name, each) for name, each in interface.methods.items()}
    named = type(interface.name, (RayHost,), {**methods, "__module__": interface.module})
    groups = {**GROUPS, **(options.get("concurrency_groups") or {})}
    return ray.remote(**{**HOST_OPTIONS, **options, "concurrency_groups": groups})(named)


def _forward(name: str, attributes: Mapping[str, Any]) -> Callable[..., Any]:
    def forward(self: RayHost, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._host.only_worker(), name)(*args, **kwargs)

    # Ray checks arguments against the signature
    vars(forward).update(attributes)
    return forward


class RayHandle:
    """Handle of a worker that is an actor: calls are its tasks, and its death is the end of `host_pulse`."""

    def __init__(self, actor: Any, name: str, control: ControlService | None = None, has_notice: bool = False) -> None:
        self.actor, self._name = actor, name
        self._using = nullcontext if control is None else control.using
        self.process = actor._actor_id.hex()
        self.death = self._call(actor.host_pulse)
        self.notice: Future[Any] = self._call(actor.host_notice) if has_notice else Future()

    def submit(self, method: Callable[..., Outcome], *args: Any) -> Future[Outcome]:
        """Call a method of the host as a task of its actor; see `WorkerHandle`."""
        return self._call(self.actor.host_serve, method.__name__, *args)

    def aside(self, key: WorkerKey, method: str, *args: Any, **kwargs: Any) -> Future[Outcome]:
        """Call a worker's method beside its ordered calls."""
        return self._call(self.actor.host_aside, key, method, args, kwargs)

    def look(self, with_stack: bool = False) -> Future[CallPosition]:
        """Return the position of the call under way."""
        return self._call(self.actor.host_look, with_stack)

    def keep(self, key: WorkerKey, method: str) -> tuple[Future[Outcome], Any]:
        """Call a worker's method, and keep its result in Ray's object store, which outlives the process.

        Returns the outcome without its value, and a reference to the value.
        """
        with self._using():
            outcome, value = self.actor.host_keep.options(num_returns=2).remote(key, method)
            return self._future(outcome), value

    def stop(self, key: WorkerKey) -> None:
        """End the process and wait until it is gone, so that its memory is free again."""
        with suppress(WorkerError, FutureTimeout):  # Ray may have ended, and its actors with it
            with self._using(), suppress(RayError):
                ray.kill(self.actor)
            self.death.result(timeout=STOP_TIMEOUT_S)

    def _call(self, method: Any, *args: Any) -> Future[Any]:
        try:
            with self._using():
                return self._future(method.remote(*args))
        except WorkerError as error:
            answer: Future[Any] = Future()
            answer.set_exception(error)
            return answer

    def _future(self, ref: ray.ObjectRef) -> Future[Any]:
        answer: Future[Any] = Future()

        def settle(done: Future[Any]) -> None:
            error = done.exception()
            with suppress(InvalidStateError):  # it was abandoned
                if error is None:
                    answer.set_result(done.result())
                elif isinstance(error, RayActorError):
                    answer.set_exception(WorkerDied(f"worker process ended: {self._name}", (self._name,)))
                elif isinstance(error, ObjectLostError):
                    why = f"{self._name}: a part of a snapshot is lost, because the node that kept it has died"
                    answer.set_exception(SnapshotLost(why))
                else:
                    answer.set_exception(WorkerError(f"Ray could not deliver a call to {self._name}: {error}"))

        ref.future().add_done_callback(settle)
        return answer


def handle_of(actor: Any | None, name: str) -> RayHandle | AbsentHandle:
    """Return the handle of an actor that may be gone.

    `actor`: Ray actor handle, or None.
    """
    return AbsentHandle(name) if actor is None else RayHandle(actor, name)


def _fetched(value: Any) -> Any:
    return ray.get(value) if isinstance(value, ray.ObjectRef) else value
