"""Connection of a program to a Ray cluster, which it joins or starts for itself. This module imports no torch."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

import ray
from ray._raylet import Config, GcsClient  # type: ignore[attr-defined]  # which its stub lacks

from rlite.errors import ConfigError, WorkerError
from rlite.runtime.cluster.guard import Guard
from rlite.runtime.cluster.launcher import default_cpu_slots
from rlite.runtime.cluster.placement import DeviceKind

logger = logging.getLogger(__name__)

AUTHENTICATES_SINCE = (2, 59)
"""Ray's first version whose local clusters ask for a token unless RAY_AUTH_MODE says otherwise"""
TOKEN = Path.home() / ".ray" / "auth_token"
ANSWER_S = 5.0
"""seconds in which the control service of a cluster has to answer"""
MAX_REASON = 300
"""characters of an error of Ray that are shown"""
RECONNECT_S = 0.2
CLOSE_S = 10.0
"""seconds that `close` waits for running calls of Ray, which do not return if its control service hangs"""


_started: list[str] = []
"""addresses of the Rays that this process has started"""


def is_started_here(address: str) -> bool:
    """Return True if the Ray at an address ends with this process."""
    return address in _started


def _parts(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


class ControlService:
    """Ray's control service (GCS), watched through a connection that ends with it."""

    def __init__(self, address: str, patience_s: float, on_end: Callable[[], None]) -> None:
        self._address, self._patience_s, self._on_end = _parts(address), patience_s, on_end
        self._line: socket.socket | None = None
        self._is_closed = self.is_gone = False
        self._uses = 0
        self._use = threading.Condition()
        threading.Thread(target=self._watch, name="rlite-ray-control", daemon=True).start()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Hold `close` back during calls of Ray's functions, which would start another Ray if this one has ended."""
        with self._use:
            if self._is_closed or self.is_gone:
                raise WorkerError("the connection to Ray has ended")
            self._uses += 1
        try:
            yield
        finally:
            with self._use:
                self._uses -= 1
                self._use.notify_all()

    def close(self) -> None:
        """Stop watching."""
        with self._use:
            self._is_closed = True
            self._use.wait_for(lambda: not self._uses, CLOSE_S)
        if self._line is not None:
            with suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        heard = time.monotonic()
        while not self._is_closed:
            with suppress(OSError), socket.create_connection(self._address, timeout=RECONNECT_S * 10) as self._line:
                self._line.settimeout(None)
                while self._line.recv(4096):  # nothing is asked: it ends the connection now and then, or ends itself
                    pass
                heard = time.monotonic()
                continue
            if not self._is_closed and time.monotonic() - heard >= self._patience_s:
                self.is_gone = True
                self._on_end()
                return
            time.sleep(RECONNECT_S)


class RayConnection:
    """This process's connection to Ray. If it started Ray, Ray ends with it."""

    def __init__(
        self, device: DeviceKind, num_devices: int | None, address: str | None, may_start: bool = True
    ) -> None:
        """Use the connection that the process has, or join a running cluster, or start Ray for this program only.

        `address`: address of a running cluster; default: RAY_ADDRESS, or a cluster that `ray start` left here.
        """
        self._guard: Guard | None = None
        check_version(ray.__version__)
        self._is_connected = not ray.is_initialized()
        try:
            if self._is_connected and not _join(address, has_to_run=not may_start):
                if not may_start:
                    raise ConfigError("no Ray cluster runs here: give its address=, or set RAY_ADDRESS")
                self._guard = Guard()
                with self._guard.marking():
                    _start(device, num_devices)
                _started.append(ray.get_runtime_context().gcs_address)
        except BaseException:
            self.close()
            raise

    @property
    def is_own(self) -> bool:
        """True if Ray was started by this connection."""
        return self._guard is not None

    def close(self, is_sound: bool = True) -> None:
        """Disconnect, and end Ray if this connection started it. Safe to call again.

        `is_sound`: Ray's control service is alive; otherwise Ray would wait for each of its processes.
        """
        guard, self._guard = self._guard, None
        if guard is not None and not is_sound:
            guard.close(patience_s=0.0)
        if self._is_connected:
            ray.shutdown()
            self._is_connected = False
        if guard is not None and is_sound:
            guard.close()


def check_version(version: str) -> None:
    """Refuse a Ray whose local clusters serve anyone who reaches their ports."""
    if tuple(map(int, version.split(".")[:2])) < AUTHENTICATES_SINCE:
        since = ".".join(map(str, AUTHENTICATES_SINCE))
        raise ConfigError(
            f"Ray {version}: its local clusters do not authenticate, so anyone who reaches this machine could run code "
            f"here. rlite needs ray>={since}: pip install -U 'rlite[ray]'"
        )


def _join(address: str | None, has_to_run: bool = False) -> bool:
    """Connect to the cluster at `address`, in RAY_ADDRESS or started on this machine.

    `address`: the address, or None. Returns False if there is no cluster, or if one that was found by chance does not
    answer or refuses this program.
    """
    asked = address or os.environ.get("RAY_ADDRESS")
    found = asked or _cluster_here()
    if found is None:
        return False
    try:
        _show_token()
        if re.fullmatch(r"[^/]+:\d+", found):
            with _explained():  # `ray.init` tries for 20 s, and does not say why it was refused
                if has_to_run:
                    socket.create_connection(_parts(found), timeout=ANSWER_S).close()
                GcsClient(address=found).internal_kv_get(b"", b"", timeout=ANSWER_S)
        _init_ray(address=found)
    except WorkerError as error:
        if asked is not None:
            raise ConfigError(f"no Ray cluster answers at address={asked!r}: {error}") from error
        logger.warning("the Ray cluster that `ray start` left here at %s is not used: %s", found, error)
        return False
    return True


def _show_token() -> None:
    """Use the token that is there, as a Ray that is started does. A cluster without authentication ignores it."""
    has_token = bool({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()) or TOKEN.exists()
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token" and not has_token:
        raise WorkerError(f"RAY_AUTH_MODE=token, and there is no token in RAY_AUTH_TOKEN or {TOKEN}")
    if "RAY_AUTH_MODE" not in os.environ and has_token:
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")  # read when Ray was imported


@contextmanager
def _explained() -> Iterator[None]:
    """Raise errors of Ray inside the block as one line. Ray reports time-outs of its start as plain exceptions."""
    try:
        yield
    except Exception as error:
        raise WorkerError(f"{type(error).__name__}: {shorten(str(error), MAX_REASON)}") from error


def _cluster_here() -> str | None:
    """Return the address that `ray start` left on this machine, if a cluster still answers there."""
    own = os.environ.get("TMPDIR") if sys.platform.startswith("linux") else None
    folder = os.environ.get("RAY_TMPDIR") or own or "/tmp"  # as Ray chooses it
    with suppress(OSError, ValueError):
        address = (
            Path(folder, "ray/ray_current_cluster").read_text(encoding="utf-8").strip()
        )  # outlives a cluster that was killed
        with socket.create_connection(_parts(address), timeout=ANSWER_S):
            return address
    return None


def _start(device: DeviceKind, num_devices: int | None) -> None:
    """Start Ray for this program only, in process groups of its own.

    A signal to this process's group, as `timeout` sends it, then reaches the program alone. It can still save.
    """
    _make_token()
    cpus = (num_devices or default_cpu_slots(os.cpu_count() or 1)) if device == "cpu" else None
    _is_apart.set()
    try:
        _init_ray(address="local", num_cpus=cpus, include_dashboard=False)
    except WorkerError as error:
        raise WorkerError(f"Ray did not start on this machine: {error}. If the machine was busy, try again") from error
    finally:
        _is_apart.clear()


def _init_ray(**options: Any) -> None:
    """Call `ray.init`, which replaces the handler of SIGTERM, and keep the program's handler if there is one."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with _explained():
            ray.init(logging_level=logging.ERROR, **options)
    except SystemExit:  # Ray's handler raises it, if SIGTERM comes meanwhile
        if callable(handler):
            handler(signal.SIGTERM, None)
        raise
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


_is_apart = threading.Event()
"""set while processes that start leave this process's group"""


def _leave_group() -> None:
    if _is_apart.is_set():
        os.setpgid(0, 0)


# it runs in what `subprocess` starts with a `preexec_fn`, as Ray's processes are
os.register_at_fork(after_in_child=_leave_group)


def _make_token() -> None:
    """Write the token that Ray's processes show each other, readable by this user alone, if there is none.

    Ray would write it as well, but readable by others, and programs that start at once would overwrite each other's.
    """
    with suppress(OSError):
        TOKEN.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=TOKEN.parent) as file:  # mode 0600
            file.write(secrets.token_hex(32))
            file.flush()
            with suppress(FileExistsError):
                os.link(file.name, TOKEN)
        TOKEN.chmod(0o600)  # Ray may have written it
