"""SGLang's server as a process, and the options of the executor.

`SglangOptions` has the options of every inference executor, of the connection, and SGLang's ServerArgs. The names of
the server arguments come from the sources of the installed package, which is not imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Gt

from rlite.backends.serving.http import CALL_S, Endpoint
from rlite.data.routing import ROUTED
from rlite.errors import CallTimeout, ConfigError, WorkerError
from rlite.runtime.replicas.replica import OptionalColumn, PassingOptions, RoutedOptions, annotated_names

KEEPER = Path(__file__).with_name("keeper.py")
LOOK_S = 0.5
"""seconds between two looks at a server that starts"""
STOP_S = 20.0
TAIL_BYTES = 20_000


class ServerProcess:
    """A server that rlite starts. Its keeper ends all its processes with this process.

    `api_key`: key that every request must have; None draws one. `devices`: indices of the server's GPUs among the GPUs
    of this process; none on CPU.
    """

    def __init__(self, ip: str, arguments: Mapping[str, Any], api_key: str | None, devices: list[int]) -> None:
        api_key, port = api_key or secrets.token_urlsafe(24), _free_port(ip)
        self.endpoint = Endpoint(f"http://{ip}:{port}", api_key)
        self._folder = tempfile.TemporaryDirectory(prefix="rlite-sglang-")
        config = Path(self._folder.name) / "server.yaml"  # not the command line, which every user can read
        given = {**arguments, "host": ip, "port": port, "api_key": api_key}
        config.write_text(json.dumps({n.replace("_", "-"): value for n, value in given.items() if value is not None}))
        self._log = Path(self._folder.name) / "server.log"
        command = [sys.executable, str(KEEPER), sys.executable, "-m", "sglang.launch_server", "--config", str(config)]
        environment = {**os.environ, **_visible(devices)}
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def wait_until_ready(self, timeout: float) -> None:
        """Return when the server has answered a health check.

        `timeout`: seconds.
        """
        deadline = time.monotonic() + timeout
        while (failure := self.failure()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                told = f"the SGLang server was not ready within {timeout:g} s; its last line: {self._cause()}. "
                self.stop()
                raise CallTimeout(told + "Give it more time (start_timeout_s=)")
            with contextlib.suppress(WorkerError):
                self.endpoint.call("/health", timeout=min(left + LOOK_S, CALL_S))
                return
            time.sleep(LOOK_S)
        self.stop()
        raise ConfigError(f"the SGLang server could not start: {failure}")

    def failure(self) -> str | None:
        """Return how the server ended and why; None while it runs."""
        exit_code = self._process.poll()
        return None if exit_code is None else f"its process ended with exit code {exit_code}: {self._cause()}"

    def stop(self) -> None:
        """End the server and all its processes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _cause(self) -> str:
        """Return the last exception in the log, or the last line without an exception."""
        with self._log.open("rb") as log:  # it may hold days of output
            log.seek(max(0, self._log.stat().st_size - TAIL_BYTES))
            tail = log.read(TAIL_BYTES).decode(errors="replace")
        lines = [line.strip() for line in tail.splitlines() if line.strip()]
        raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
        return (raised or lines or ["its log is empty"])[-1]


def _visible(devices: list[int]) -> dict[str, str]:
    """Return the environment in which a child sees these GPUs alone."""
    if not devices:
        return {}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(index) for index in range(max(devices) + 1)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[index] for index in devices)}


def _free_port(ip: str) -> int:
    with socket.create_server((ip, 0)) as listener:
        return listener.getsockname()[1]


REMEDY = "pip install 'rlite[sglang]', or attach to running servers with addresses=[...]"
OWN = {
    "model_path": "the engine's checkpoint is served",
    "host": "the server listens at the address of its worker",
    "port": "the server takes a free port",
    "tp_size": "use tensor_parallel_size of build",
    "dp_size": "use data_parallel_size of build",
    "nnodes": "a replica lives on one node",
    "node_rank": "a replica lives on one node",
    "context_length": "use max_model_len",
    "max_running_requests": "use max_num_seqs",
    "mem_fraction_static": "use gpu_memory_utilization",
    "random_seed": "use seed",
    "skip_tokenizer_init": "stop strings need the tokenizer",
    "incremental_streaming_output": "rlite sets it",
    "weight_version": "rlite sets it to the policy version",
}
"""server arguments that rlite sets, with the reason or the option to use instead"""


def installed() -> Path | None:
    """Return the folder of the installed package sglang, None without it."""
    spec = importlib.util.find_spec("sglang")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def server_arguments() -> frozenset[str]:
    """Return the names of the installed SGLang's server arguments; none without SGLang."""
    package = installed()
    groups = () if package is None else (package / "srt/arg_groups/fields").glob("*.py")
    return frozenset().union(*map(_arguments_of, groups))


_arguments_of = cache(annotated_names)


class ServerOptions(RoutedOptions):
    """Options of `executor="sglang"` beside SGLang's server arguments."""

    addresses: Sequence[str] = ()
    """URLs of running servers, one for each replica. rlite attaches to these servers, and never stops them"""
    api_key: str | None = None
    """key of the servers at `addresses`; a server that rlite starts gets a random key"""
    start_timeout_s: Annotated[float, Gt(0)] = 1800.0
    """seconds that a server may take to start, to load a checkpoint, or to move weights"""
    stall_timeout_s: Annotated[float, Gt(0)] = 300.0
    """seconds without any token, with requests in flight, after which a server counts as lost"""
    weight_transport: Literal["auto", "tensors", "group"] = "auto"
    """path of new weights to the server: "tensors" in a request (on one GPU by CUDA IPC), or "group", a broadcast in a
    process group. "auto" is "tensors" to a server that rlite starts, and "group" to a server at `addresses`"""


ROUTING = "enable_return_routed_experts"
"""SGLang's argument and rlite's option that let a server return the experts that it chose"""
CONNECTION = {"addresses", "api_key", "seed", "start_timeout_s", "stall_timeout_s", "weight_transport", ROUTING}
"""options that are allowed with `addresses`; the others belong to the start of a server"""


class SglangOptions(PassingOptions):
    """Options of `executor="sglang"`."""

    executor = "sglang"
    fields = ServerOptions
    reserved = OWN

    addresses: Sequence[str]
    api_key: str | None
    start_timeout_s: float
    stall_timeout_s: float
    weight_transport: str
    enable_return_routed_experts: bool

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if self.addresses:
            _check_attached(self.addresses, values)
        elif installed() is None:
            raise ConfigError(f"executor 'sglang' needs the package sglang, which is not installed: {REMEDY}")
        if self.enable_return_routed_experts and (obstacle := routing_obstacle(values)):
            raise ConfigError(f"{ROUTING}=true: {obstacle}")

    @classmethod
    def arguments(cls) -> frozenset[str]:
        """Return the names of the installed SGLang's server arguments; none without SGLang."""
        return server_arguments()


def routing_obstacle(options: Mapping[str, Any]) -> str:
    """Return why servers cannot return the experts that they chose; "" if they can."""
    if options.get("addresses"):
        told = f"the servers at addresses may not return them; {ROUTING}=true beside addresses says that they do"
        return "" if options.get(ROUTING) else told
    return "" if ROUTING in server_arguments() else "the installed SGLang does not record them"


OPTIONAL = {ROUTED: OptionalColumn(ROUTING, routing_obstacle)}


def _check_attached(addresses: Sequence[str], given: dict[str, Any]) -> None:
    if not_applicable := sorted(given.keys() - CONNECTION):
        told = f"with addresses the servers run already, so only {', '.join(sorted(CONNECTION))} are allowed"
        raise ConfigError(f"{', '.join(not_applicable)}: {told}. Give these options to the servers when you start them")
    if wrong := [address for address in addresses if not address.startswith(("http://", "https://"))]:
        raise ConfigError(f"addresses: {wrong[0]!r} is no URL; expected one like 'http://10.0.0.1:30000'")
    if len(set(addresses)) < len(addresses):
        raise ConfigError("addresses: a server is named twice; expected one server for each replica")
