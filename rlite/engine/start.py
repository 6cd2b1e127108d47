"""`rlite.init()` and `rlite.session()`: the start of a program's session, with defaults for its engines."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rlite.config import Options
from rlite.engine.registry import find_backend, kinds_of, registered_executors
from rlite.errors import ConfigError, RliteError, UnknownOptionError, did_you_mean
from rlite.runtime.cluster.launcher import SessionOptions
from rlite.runtime.cluster.placement import DeviceKind
from rlite.runtime.cluster.session import LauncherName, Session, open_session, shutdown
from rlite.runtime.replicas.engine import Engine
from rlite.runtime.replicas.workers import Backend

EngineOptions = Mapping[str, Mapping[str, Any]]
"""options of executors, by the name of the executor"""


def init(
    device: DeviceKind | None = None,
    num_devices: int | None = None,
    launcher: LauncherName | None = None,
    address: str | None = None,
    num_threads: int | None = None,
    call_timeout: float = 3600.0,
    start_timeout: float = 300.0,
    engine_options: EngineOptions | None = None,
) -> Session:
    """Start the program's session, or attach to a running cluster.

    Under torchrun only rank 0 returns; the other ranks serve it and exit when it is done.

    Args:
        device: "cuda" or "cpu"; default: CUDA if there is one.
        num_devices: devices to use; default: all GPUs, or min(cores, 8) CPU slots.
        launcher: "torchrun" (default under torchrun), "inprocess" (default for one device) or "ray".
        address: address of a Ray cluster; default: RAY_ADDRESS, a cluster that `ray start` left here, or a new one.
        num_threads: torch threads per worker; default: the node's cores divided by its devices.
        call_timeout: seconds that a call may take before CallTimeout names the late workers.
        start_timeout: seconds that starting workers may take.
        engine_options: defaults of `build`, by the name of the executor, such as {"torch": {"max_num_seqs": 64}}.
            Arguments of `build` take precedence.

    Returns:
        The session.

    Raises:
        ConfigError: a session exists, the device is missing, the launcher is not available, or `engine_options` names
            an unknown executor or holds a value that cannot work.
        UnknownOptionError: an executor does not know an option.
        RliteError: this is a forked child of a process with a session.
    """
    check_engine_options(engine_options or {})
    chosen: DeviceKind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = SessionOptions(chosen, num_devices, address, num_threads, call_timeout, start_timeout)
    return open_session(options, launcher, engine_options)


@contextmanager
def session(**options: Any) -> Iterator[Session]:
    """Start the program's session, and end it after the block, also if the block raises.

        with rlite.session(num_devices=1):
            ...

    Args:
        **options: arguments of `init`.

    Yields:
        The session.

    Raises:
        ConfigError: a session is open already, which stays open; or as for `init`.
    """
    started = init(**options)
    try:
        yield started
    finally:
        shutdown()


def check_engine_options(engine_options: EngineOptions) -> None:
    """Check that all executors are registered, and know their options.

    Raises:
        ConfigError: an executor is unknown, or a value cannot work.
        UnknownOptionError: an executor does not know an option.
    """
    for name, options in engine_options.items():
        where = f"engine_options[{name!r}]"
        kinds = kinds_of(name)
        if not kinds:
            executors = [*registered_executors("train"), *registered_executors("inference")]
            raise ConfigError(f"engine_options: unknown executor {name!r}; {did_you_mean(name, executors)}")
        if not isinstance(options, Mapping):
            raise ConfigError(f"{where}={options!r}: expected a mapping of options of `build`")
        backends = [find_backend(kind, name, Backend) for kind in kinds]
        known = {key for backend in backends for key in inspect.signature(backend.options).parameters}
        for key in options.keys() - known:
            raise UnknownOptionError(f"{where} does not know the option {key!r}; {_hint(key, known)}")
        for backend in backends:
            _check_values(where, backend, options)


def _hint(key: str, known: set[str]) -> str:
    if key in inspect.signature(Engine.build).parameters:
        return "it places one engine: give it to that engine's `build`"
    return did_you_mean(key, known)


def _check_values(where: str, backend: Backend, options: Mapping[str, Any]) -> None:
    """Check values of options that are a pydantic model; `build` checks those of other executors.

    Raises:
        ConfigError: a value cannot work.
    """
    if issubclass(backend.options, Options):
        own = backend.options.model_fields.keys()
        try:
            backend.options(**{key: value for key, value in options.items() if key in own})
        except RliteError as error:
            raise ConfigError(f"{where}: {error}") from None
