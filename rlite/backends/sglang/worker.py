"""The worker of the SGLang executor: it starts or finds the server of its replica, moves its memory, and feeds weights.

The first rank of a replica does this. The other ranks hold the devices of SGLang's own processes.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from rlite.backends.sglang.options import SglangOptions
from rlite.backends.sglang.server import CallRefused, Endpoint, ServerProcess
from rlite.backends.sglang.weights import (
    Bucket,
    GroupSender,
    Sender,
    TensorSender,
    make_buckets,
    served_parameters,
    update_weights,
)
from rlite.engine.workers import Part
from rlite.errors import CheckpointError, ConfigError, WorkerError
from rlite.nn.pretrained import load_config, stored_dtype
from rlite.runtime.cluster.host import WorkerContext
from rlite.runtime.parallel.processes import subgroup
from rlite.runtime.parallel.shards import ParameterShard

PARTS = ("weights", "kv_cache")
"""parts of a server's memory, by SGLang's tags"""


class SglangWorker:
    """The owner of one server, started or attached.

    Args:
        context: place of this worker.
        path: folder of the checkpoint.
        options: options of the executor.
        executor_size: number of workers in a replica.

    Raises:
        ConfigError: the server cannot start, cannot be reached, or serves another model.
    """

    def __init__(self, context: WorkerContext, path: str, options: SglangOptions, executor_size: int) -> None:
        self._context, self._path, self._options, self._size = context, path, options, executor_size
        self._device = torch.device(context.torch_device)
        self._endpoint: Endpoint | None = None
        self._process: ServerProcess | None = None
        self._sender: Sender | None = None
        self._buckets: list[Bucket] = []
        self._on_device = set(PARTS)
        devices = self._devices()
        if context.rank % executor_size:
            return
        config = load_config(path)
        dtype = getattr(torch, options.dtype) if options.dtype else stored_dtype(path, config)
        self._parameters = served_parameters(path, dtype)
        longest = options.max_model_len or config.get_text_config().max_position_embeddings
        server = self._attach(config.model_type) if options.addresses else self._start(devices, dtype, longest)
        self._info = server.call("/server_info")
        self._endpoint = replace(
            server,
            max_model_len=self._info.get("context_length") or longest,
            vocab_size=config.get_text_config().vocab_size,
        )
        self.set_version(0)

    def endpoint(self) -> Endpoint | None:
        """Return the address of the replica's server; None on ranks without a server."""
        return self._endpoint

    def server_failure(self) -> str | None:
        """Return how the server of this worker ended; None if it runs, or if rlite did not start it."""
        return None if self._process is None else self._process.failure()

    def stop(self) -> None:
        """End the server if this worker started it."""
        if self._sender is not None:
            self._sender.close()
        if self._process is not None:
            self._process.stop()

    # -- starting ------------------------------------------------------------------------------------------------

    def _devices(self) -> list[int]:
        """Return the replica's GPUs as this process numbers them; none on CPU. A collective of the replica's ranks.

        Raises:
            ConfigError: the devices are on several nodes, or the replica of a running server has several workers.
        """
        own = (self._context.device.node, self._device.index or 0)
        places = [own] * self._size
        if self._size > 1:
            if self._options.addresses:
                raise ConfigError("tensor_parallel_size: with addresses, a replica is a running server; leave it out")
            group = subgroup(self._context.replica_ranks(self._size), "sglang", "gloo")
            dist.all_gather_object(places, own, group=group)
        if len({node for node, _ in places}) > 1:
            raise ConfigError(f"tensor_parallel_size={self._size}: the devices of an SGLang server must be on one node")
        return [] if self._device.type == "cpu" else [index for _, index in places]

    def _start(self, devices: list[int], dtype: torch.dtype, longest: int) -> Endpoint:
        options = self._options
        arguments: dict[str, Any] = {
            "log_level_http": "warning",
            "enable_memory_saver": True,
            "enable_weights_cpu_backup": True,
            **options.passed_on,
            "model_path": self._path,
            "tp_size": self._size,
            "dtype": str(dtype).removeprefix("torch."),
            "context_length": longest,
            "max_running_requests": options.max_num_seqs,
            "mem_fraction_static": options.gpu_memory_utilization,
            "random_seed": options.seed % 2**31,
            "incremental_streaming_output": True,
        }
        self._process = process = ServerProcess(self._context.device.ip, arguments, options.api_key, devices)
        weakref.finalize(self, process.stop)
        process.wait_until_ready(options.start_timeout_s)
        return process.endpoint

    def _attach(self, model_type: str) -> Endpoint:
        endpoint = Endpoint(self._options.addresses[self._context.rank].rstrip("/"), self._options.api_key)
        try:
            served = endpoint.call("/model_info")
        except WorkerError as error:
            raise ConfigError(f"addresses: {error}") from error
        if (served.get("model_type") or model_type) != model_type:
            raise ConfigError(
                f"the server at {endpoint.url} serves {served.get('model_path')}, a model of type "
                f"{served['model_type']!r}; {self._path} is of type {model_type!r}"
            )
        return endpoint

    # -- weights -------------------------------------------------------------------------------------------------

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """Return staging memory on the host for all parameters. `weights_changed` sends it to the server."""
        if self._endpoint is None:
            return {}
        if not self._buckets:
            self._buckets = make_buckets(self._parameters)
        return {name: shard for bucket in self._buckets for name, shard in bucket.shards().items()}

    def weights_changed(self, version: int) -> None:
        """Send staged weights to the server, and give the server's weights this policy version.

        Args:
            version: policy version.
        """
        if self._endpoint is None:
            return
        if self._buckets:
            self._sender = self._sender or self._make_sender(self._endpoint)
            buckets, self._buckets = self._buckets, []
            update_weights(self._endpoint, self._sender, buckets, self._options.start_timeout_s)
        self.set_version(version)

    def _make_sender(self, server: Endpoint) -> Sender:
        timeout = self._options.start_timeout_s
        num_ranks = int(self._info.get("tp_size") or 1)
        automatic = "group" if self._process is None else "tensors"
        chosen = automatic if self._options.weight_transport == "auto" else self._options.weight_transport
        if chosen == "group":
            return GroupSender(server, num_ranks, server.own_ip(), self._device, timeout)
        return TensorSender(server, num_ranks, self._device, timeout)

    def load_weights(self, path: str | None) -> None:
        """Let the server read weights from a checkpoint; None is the engine's own.

        Args:
            path: folder of a checkpoint that the server can read.

        Raises:
            CheckpointError: the server could not read it.
        """
        if self._endpoint is not None:
            self.to_device("weights")
            self._buckets = []  # what a failed sync has left
            body = {"model_path": path or self._path}
            try:
                self._endpoint.call("/update_weights_from_disk", body, self._options.start_timeout_s)
            except CallRefused as error:
                raise CheckpointError(str(error)) from error

    def set_version(self, version: int) -> None:
        """Stamp tokens with this policy version from now on."""
        if self._endpoint is not None:
            self._endpoint.call("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    # -- residency -----------------------------------------------------------------------------------------------

    def to_device(self, what: Part) -> None:
        """Move a part of the server's memory back to the device."""
        wanted = PARTS if what == "all" else (what,)
        if missing := [part for part in wanted if part not in self._on_device]:
            self._move("/resume_memory_occupation", missing)
            self._on_device.update(missing)

    def to_cpu(self) -> None:
        """Keep the server's weights in host memory, and drop its KV cache.

        Raises:
            ConfigError: an attached server would lose its weights.
        """
        if self._endpoint is not None and not self._info.get("enable_weights_cpu_backup"):
            raise ConfigError(
                f"cpu(): the server at {self._endpoint.url} runs without enable_weights_cpu_backup and would lose its "
                "weights. Use meta(), or start it with --enable-weights-cpu-backup"
            )
        self.to_meta()

    def to_meta(self) -> None:
        """Free the server's weights and KV cache on the device. SGLang keeps a copy of the weights on the host."""
        if there := [part for part in PARTS if part in self._on_device]:
            self._move("/release_memory_occupation", there)
            self._on_device.difference_update(there)

    def _move(self, path: str, parts: list[str]) -> None:
        if self._endpoint is None:
            return
        if not self._info.get("enable_memory_saver"):
            raise ConfigError(
                f"the server at {self._endpoint.url} runs without enable_memory_saver, so its memory cannot move; "
                "start it with --enable-memory-saver"
            )
        self._endpoint.call(path, {"tags": parts}, self._options.start_timeout_s)

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that the server holds on all its devices, by part: weights, kv_cache."""
        if self._endpoint is None:
            return {"weights": 0, "kv_cache": 0}
        weights = sum(math.prod(shape) * dtype.itemsize for dtype, shape in self._parameters.values())
        usage = [state.get("memory_usage", {}) for state in self._info.get("internal_states", [])]
        cache = int(sum(each.get("kvcache", 0.0) for each in usage) * 2**30) * int(self._info.get("tp_size") or 1)
        held = {"weights": weights, "kv_cache": cache}
        return {part: held[part] if part in self._on_device else 0 for part in PARTS}
