"""Options of `executor="sglang"`: options of every inference executor, of the connection, and SGLang's ServerArgs.

The names of the server arguments come from the sources of the installed package, which is not imported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Gt

from rlite.errors import ConfigError
from rlite.runtime.replicas.replica import PassingOptions, WrappedOptions, annotated_names

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
    return frozenset() if package is None else _server_arguments(package)


@cache
def _server_arguments(package: Path) -> frozenset[str]:
    groups = (package / "srt/arg_groups/fields").glob("*.py")
    return frozenset().union(*map(annotated_names, groups))


class ServerOptions(WrappedOptions):
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


CONNECTION = {"addresses", "api_key", "seed", "start_timeout_s", "stall_timeout_s", "weight_transport"}
"""options that are allowed with `addresses`; the others belong to the start of a server"""


class SglangOptions(PassingOptions):
    """Options of `executor="sglang"`.

    Args:
        **values: fields of `ServerOptions`, and server arguments of SGLang.

    Raises:
        ConfigError: a value cannot work, SGLang is missing, or an option does not apply to running servers.
        UnknownOptionError: an option is unknown.
    """

    executor = "sglang"
    fields = ServerOptions
    reserved = OWN

    addresses: Sequence[str]
    api_key: str | None
    start_timeout_s: float
    stall_timeout_s: float
    weight_transport: str

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if self.addresses:
            _check_attached(self.addresses, values)
        elif installed() is None:
            raise ConfigError(f"executor 'sglang' needs the package sglang, which is not installed: {REMEDY}")

    @classmethod
    def arguments(cls) -> frozenset[str]:
        """Return the names of the installed SGLang's server arguments; none without SGLang."""
        return server_arguments()

    @property
    def num_replicas(self) -> int | None:
        """Number of replicas if the options fix it."""
        return len(self.addresses) or None


def _check_attached(addresses: Sequence[str], given: dict[str, Any]) -> None:
    if not_applicable := sorted(given.keys() - CONNECTION):
        raise ConfigError(
            f"{', '.join(not_applicable)}: with addresses the servers run already, so only "
            f"{', '.join(sorted(CONNECTION))} are allowed. Give these options to the servers when you start them"
        )
    for address in addresses:
        if not address.startswith(("http://", "https://")):
            raise ConfigError(f"addresses: {address!r} is no URL; expected one like 'http://10.0.0.1:30000'")
    if len(set(addresses)) < len(addresses):
        raise ConfigError("addresses: a server is named twice; expected one server for each replica")
