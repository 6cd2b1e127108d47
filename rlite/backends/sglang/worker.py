"""The worker of the SGLang executor: it starts or finds the server of its replica, moves its memory, and feeds weights.

The first rank of a replica does this. The other ranks hold the devices of SGLang's own processes.

Weights on their way to a server: staged in host memory by weight sync, then sent bucket by bucket.

SGLang takes a bucket as one flat tensor with the names, types and shapes of its parts ("flattened_bucket"). The
flat tensor travels in the request, by CUDA IPC on a GPU, or by a broadcast in a process group.
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
import pickle
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.multiprocessing import reductions

from rlite.backends.sglang.server import CallRefused, Endpoint, ServerProcess, SglangOptions
from rlite.errors import CheckpointError, ConfigError, WeightSyncError, WorkerError
from rlite.nn.pretrained import load_config, meta_model, stored_dtype
from rlite.runtime.cluster.host import WorkerContext
from rlite.runtime.parallel.processes import close_store, connect_store, open_store, subgroup
from rlite.runtime.parallel.shards import ParameterShard
from rlite.runtime.replicas.workers import Part

BUCKET_BYTES = 256 * 2**20
FORMAT = "flattened_bucket"


class BucketPart(NamedTuple):
    """One parameter of a bucket."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    """index of its first byte in the bucket"""
    end: int


class Bucket(NamedTuple):
    """Parameters that travel together: views of one flat tensor of bytes in host memory, without gaps."""

    flat: Tensor
    parts: list[BucketPart]

    def shards(self) -> dict[str, ParameterShard]:
        """Return the parameters, for weight sync to write."""
        return {
            name: ParameterShard(self.flat[start:end].view(dtype).view(shape), (0,) * len(shape), tuple(shape))
            for name, dtype, shape, start, end in self.parts
        }


def make_buckets(
    parameters: Mapping[str, tuple[torch.dtype, torch.Size]], most_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """Return buckets of at most `most_bytes` bytes; a larger parameter travels alone.

    SGLang expects no gaps, so wide types come first and every parameter is aligned.
    """
    groups: list[list[BucketPart]] = []
    for name, (dtype, shape) in sorted(parameters.items(), key=lambda item: -item[1][0].itemsize):
        nbytes = math.prod(shape) * dtype.itemsize
        if not groups or groups[-1][-1].end + nbytes > most_bytes:
            groups.append([])
        start = groups[-1][-1].end if groups[-1] else 0
        groups[-1].append(BucketPart(name, dtype, shape, start, start + nbytes))
    return [Bucket(torch.empty(parts[-1].end, dtype=torch.uint8), parts) for parts in groups]


class TensorSender:
    """Sends buckets in requests: the bytes themselves from a CPU, a CUDA IPC handle from a GPU.

    Args:
        endpoint: the server.
        num_ranks: tensor-parallel ranks of the server; each reads an entry of its own.
        device: device of the flat tensors that are sent.
        timeout: seconds for each bucket.
    """

    def __init__(self, endpoint: Endpoint, num_ranks: int, device: torch.device, timeout: float) -> None:
        self._endpoint, self._num_ranks, self._device, self._timeout = endpoint, num_ranks, device, timeout

    def send(self, bucket: Bucket) -> None:
        """Send a bucket; return when the server has loaded it."""
        flat = bucket.flat.to(self._device)
        body = {
            # a CUDA IPC handle that is opened twice is never freed
            "serialized_named_tensors": [serialized(flat, bucket) for _ in range(self._num_ranks)],
            "load_format": FORMAT,
            "flush_cache": False,
        }
        self._endpoint.call("/update_weights_from_tensor", body, self._timeout)
        del flat
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def close(self) -> None:
        """Do nothing: every bucket was freed when the server had loaded it."""


def serialized(flat: Tensor, bucket: Bucket) -> str:
    """Return a bucket in the form of SGLang's serializer: a pickle in base64.

    Args:
        flat: the bucket's bytes, on the device from which they are sent.
        bucket: the bucket.
    """
    metadata = [
        SimpleNamespace(name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=end - start)
        for name, dtype, shape, start, end in bucket.parts
    ]
    content = {"flattened_tensor": flat, "metadata": metadata}
    buffer = io.BytesIO()
    _Pickler(buffer).dump(content)
    return base64.b64encode(buffer.getbuffer()).decode()


class _Pickler(pickle.Pickler):
    """Pickles CPU tensors by value, and CUDA tensors by a handle that names their GPU by its UUID.

    The server may number its GPUs in another way. torch's own handles of CPU tensors are for children alone.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:6], uuid, *arguments[7:])  # the seventh is the index of the GPU


class GroupSender:
    """Broadcasts buckets in a process group of this process, as rank 0, and the server's ranks.

    Args:
        endpoint: the server.
        num_ranks: tensor-parallel ranks of the server.
        ip: address of this node.
        device: device of the flat tensors that are sent; decides between gloo and NCCL.
        timeout: seconds for each bucket.
    """

    def __init__(self, endpoint: Endpoint, num_ranks: int, ip: str, device: torch.device, timeout: float) -> None:
        self._endpoint, self._ip, self._device, self._timeout = endpoint, ip, device, timeout
        self._size = num_ranks + 1
        self._name = f"rlite-{secrets.token_hex(8)}"
        self._port: int | None = None
        self._group: Any = None

    def send(self, bucket: Bucket) -> None:
        """Send a bucket; return when the server has loaded it."""
        if self._group is None:
            self._meet()
        body = {
            "names": [part.name for part in bucket.parts],
            "dtypes": [str(part.dtype).removeprefix("torch.") for part in bucket.parts],
            "shapes": [list(part.shape) for part in bucket.parts],
            "group_name": self._name,
            "load_format": FORMAT,
            "flush_cache": False,
        }
        flat = bucket.flat.to(self._device)
        self._both("/update_weights_from_distributed", body, lambda: self._group.broadcast(flat, 0).wait())

    def close(self) -> None:
        """Leave the process group."""
        if self._group is None:
            return
        with contextlib.suppress(WorkerError):
            self._endpoint.call("/destroy_weights_update_group", {"group_name": self._name})
        self._leave()

    def _meet(self) -> None:
        self._port = open_store(self._ip)
        backend = "gloo" if self._device.type == "cpu" else "nccl"
        body = {
            "master_address": self._ip,
            "master_port": self._port,
            "rank_offset": 1,
            "world_size": self._size,
            "group_name": self._name,
            "backend": backend,
        }
        self._both("/init_weights_update_group", body, lambda: self._join(backend))

    def _join(self, backend: str) -> None:
        """Join as SGLang's ranks do, so that both sides look for each other under the same keys."""
        assert self._port is not None
        store = dist.PrefixStore(self._name, connect_store(self._ip, self._port, self._timeout))
        timeout = timedelta(seconds=self._timeout)
        self._group, _ = c10d._new_process_group_helper(
            self._size, 0, [], dist.Backend(backend), store, c10d.GroupName(self._name), timeout=timeout
        )

    def _both(self, path: str, body: Mapping[str, Any], act: Callable[[], object]) -> None:
        """Call the server, and act at the same time. A failure on either side leaves the group.

        Raises:
            WeightSyncError: this side failed.
            WorkerError: the server failed.
        """
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._endpoint.call, path, body, self._timeout)
            try:
                act()
            except RuntimeError as error:
                self._leave()
                answer.result()  # the server's reason, if it has one
                raise WeightSyncError(f"broadcast of weights to {self._endpoint.url}: {error}") from error
            try:
                answer.result()
            except BaseException:
                self._leave()
                raise

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
        if self._port is not None:
            close_store(self._port)


Sender = TensorSender | GroupSender


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
        named = meta_model(config, dtype).named_parameters()
        self._parameters = {name: (parameter.dtype, parameter.shape) for name, parameter in named}
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

        Raises:
            WeightSyncError: the server refused weights.
        """
        if self._endpoint is None:
            return
        if self._buckets:
            self._sender = self._sender or self._make_sender(self._endpoint)
            buckets, self._buckets = self._buckets, []
            try:
                self._send(self._endpoint, self._sender, buckets)
            except CallRefused as error:
                raise WeightSyncError(str(error)) from error
        self.set_version(version)

    def _send(self, server: Endpoint, sender: Sender, buckets: Sequence[Bucket]) -> None:
        """Write all buckets into the server, and drop the KV cache of the old weights."""
        timeout = self._options.start_timeout_s
        server.call("/begin_weight_update", {}, timeout)
        try:
            for bucket in buckets:
                sender.send(bucket)
        finally:
            server.call("/end_weight_update", {}, timeout)
        server.call("/flush_cache", {}, timeout)

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
